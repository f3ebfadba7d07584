"""The shape of a model: names follow Hugging Face's ``config.json`` of the same family."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from longarc.config.index_share import IndexerKind, check_kinds, indexer_kinds
from longarc.config.rope import RopeScaling
from longarc.config.settings import Settings
from longarc.config.transformers_model import TransformersConfig

ComputeDtype: TypeAlias = Literal["float32", "bfloat16"]
"""What matrix products round their two factors to; sums are fp32 in both."""

MAX_LAYERS = 10_000
"""No model has as many; a file that says more is damaged, and would be counted layer by layer."""
MAX_DEPTHS = 16
"""Depths of multi-token prediction that a config may ask for."""


class GlmMoeDsaConfig(Settings):
    """GLM-5 family: MLA with sparse attention (DSA) and a sigmoid-routed mixture of experts.

    The defaults are ``longarc-nano``, the model of the quickstart.
    """

    family: Literal["glm_moe_dsa"] = "glm_moe_dsa"
    """Which architecture this is."""
    vocab_size: int = Field(2048, ge=16)
    """Rows of the embedding [tokens]; at least the tokenizer's size."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(4, ge=1, le=MAX_LAYERS)
    """Decoder layers."""
    first_k_dense_replace: int = Field(1, ge=0)
    """Leading layers with a dense feed-forward instead of experts."""
    num_attention_heads: int = Field(4, ge=1)
    """Attention heads."""
    q_lora_rank: int = Field(64, ge=1)
    """Width of the query latent."""
    kv_lora_rank: int = Field(64, ge=1)
    """Width of the key-value latent, which is what the cache holds."""
    qk_nope_head_dim: int = Field(16, ge=1)
    """Query and key width per head without rotation."""
    qk_rope_head_dim: int = Field(16, ge=2)
    """Query and key width per head with rotation; even."""
    v_head_dim: int = Field(32, ge=1)
    """Value width per head; differs from the key width."""
    intermediate_size: int = Field(256, ge=1)
    """Width of a dense feed-forward."""
    moe_intermediate_size: int = Field(64, ge=1)
    """Width of one expert."""
    n_routed_experts: int = Field(8, ge=1)
    """Experts a token can be routed to."""
    num_experts_per_tok: int = Field(2, ge=1)
    """Experts a token is routed to."""
    n_shared_experts: int = Field(1, ge=0)
    """Experts every token uses."""
    routed_scaling_factor: float = 2.5
    """Factor on the normalised routing weights; GLM-5, config.json."""
    norm_topk_prob: bool = True
    """Whether routing weights of a token are normalised to sum 1 before scaling."""
    index_n_heads: int = Field(4, ge=1)
    """Lightning-indexer heads."""
    index_head_dim: int = Field(16, ge=2)
    """Lightning-indexer width per head; at least qk_rope_head_dim."""
    index_topk: int = Field(64, ge=1)
    """Keys each query attends to [tokens]; keep it below the contexts in use, or nothing is sparse. More than the
    longest context is no error: checkpoints with a short context exist, and all their keys are attended to."""
    index_topk_freq: int = Field(1, ge=1)
    """Of so many layers one has an indexer, and the others reuse its selection; 1 gives every layer one,
    4 in GLM-5.2."""
    index_skip_topk_offset: int = Field(2, ge=0)
    """Leading layers that all have an indexer, where index_topk_freq is above 1; 3 in GLM-5.2."""
    index_topk_pattern: str | None = Field(None, pattern="^[FS]+$")
    """One letter for each layer, instead of the two above: F has an indexer, S reuses the selection of the
    last F before it. ``longarc models share`` finds one."""
    indexer_types: tuple[IndexerKind, ...] | None = None
    """The same as words, as transformers writes it."""
    rope_theta: float = Field(1e4, gt=1)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary embeddings reach beyond the context that the model was trained on; None for plain ones."""
    rms_norm_eps: float = Field(1e-5, ge=0)
    """Added to the mean square inside every RMSNorm."""
    latent_norm_eps: float | None = Field(None, ge=0)
    """Epsilon of q_a_layernorm and kv_a_layernorm; None = rms_norm_eps (official); transformers uses 1e-6."""
    max_position_embeddings: int = Field(4096, ge=8)
    """Longest context [tokens]."""
    initializer_range: float = Field(0.05, gt=0)
    """Standard deviation of the initial weights; 0.02 in GLM-5, whose width is 48 times the default's."""
    num_nextn_predict_layers: int = Field(0, ge=0, le=1)
    """Layers for multi-token prediction (MTP) behind the decoder layers: 1 in GLM-5, whose depths share it; 0
    builds none. An ``mtp`` stage adds it to a finished model."""
    mtp_num_depths: int = Field(3, ge=1, le=MAX_DEPTHS)
    """Tokens that the MTP layer learns to draft one after another [tokens]; 3 in the GLM-5 report, 2.1. No weight
    depends on it, so more may be drafted later."""
    mtp_feeds_normed: bool = True
    """Whether a depth hands the next one its state after ``shared_head.norm``, as Megatron and SGLang do; False
    hands on the residual stream, as vLLM does. The first depth reads the main model's state after the final norm."""
    mtp_query_position: Literal["advance", "stay"] = "advance"
    """Where a later depth's query stands (not published): ``advance`` at the token it reads, one further with every
    depth, as in inference; ``stay`` at the position whose keys it shares, as in Megatron's training."""

    @property
    def num_selected(self) -> int:
        """Keys that a query can attend to at most [tokens]: index_topk, or all where the context is shorter."""
        return min(self.index_topk, self.max_position_embeddings)

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: rotation acts on pairs"
            )
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim={self.index_head_dim} is smaller than qk_rope_head_dim="
                f"{self.qk_rope_head_dim}: the indexer rotates that many dimensions. Raise index_head_dim."
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts="
                f"{self.n_routed_experts}"
            )
        return self

    @model_validator(mode="after")
    def _indexers_fit(self) -> Self:
        check_kinds(self.indexer_kinds, num_layers=self.num_hidden_layers)
        if self.index_topk_pattern is not None and self.indexer_types is not None:
            raise ValueError(
                f"index_topk_pattern={self.index_topk_pattern!r} and indexer_types say the same thing twice; "
                f"leave one of them out"
            )
        return self

    @property
    def indexer_kinds(self) -> tuple[IndexerKind, ...]:
        """Whether each layer has an indexer or reuses a selection."""
        return indexer_kinds(
            self.num_hidden_layers,
            frequency=self.index_topk_freq,
            offset=self.index_skip_topk_offset,
            pattern=self.index_topk_pattern,
            types=self.indexer_types,
        )

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """The layers that have an indexer."""
        return tuple(i for i, kind in enumerate(self.indexer_kinds) if kind == "full")


class LlamaConfig(Settings):
    """Llama-type decoder: grouped-query attention and a dense feed-forward, Hugging Face names.

    Also Qwen2 (``attention_bias = "inputs"``) and Qwen3 (``qk_norm = true``).
    """

    family: Literal["llama"] = "llama"
    """Which architecture this is."""
    vocab_size: int = Field(2048, ge=16)
    """Rows of the embedding [tokens]."""
    hidden_size: int = Field(192, ge=8)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(4, ge=1, le=MAX_LAYERS)
    """Decoder layers."""
    num_attention_heads: int = Field(6, ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(2, ge=1)
    """Key and value heads; divides num_attention_heads."""
    head_dim: int | None = None
    """Width per head; None = hidden_size / num_attention_heads."""
    intermediate_size: int = Field(512, ge=1)
    """Width of the feed-forward."""
    attention_bias: Literal["none", "inputs", "all"] = "none"
    """Which projections of attention have a bias: none, as in Llama; ``inputs``, those to queries, keys and
    values, as in Qwen2; or ``all``, the output's too, as transformers' Llama and Qwen3 have it."""
    qk_norm: bool = False
    """Whether each head of queries and keys is normalised before it is rotated, as in Qwen3."""
    rope_theta: float = Field(1e4, gt=1)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How rotary embeddings reach beyond the context that the model was trained on; None for plain ones."""
    rms_norm_eps: float = Field(1e-5, ge=0)
    """Added to the mean square inside every RMSNorm."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding."""
    compute_dtype: ComputeDtype = "float32"
    """What every matrix product rounds its two factors to, the output projection's too, in the engine and in training
    alike; sums, the residual stream, keys and values are fp32, and so are weights and their files. ``bfloat16`` is for
    processors that multiply it faster (AVX512-BF16): the rounding is the same on others."""
    max_position_embeddings: int = Field(4096, ge=8)
    """Longest context [tokens]."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                f"{self.num_attention_heads}; set head_dim"
            )
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        if width % 2:
            raise ValueError(
                f"the heads are {width} wide (head_dim, or hidden_size={self.hidden_size} / "
                f"num_attention_heads={self.num_attention_heads}), but rotation acts on pairs; set an even head_dim"
            )
        return self


class AttentionPattern(Settings):
    """What attends in each layer of a hybrid; GLM-5 report, 2.1.2."""

    layers: str = Field(min_length=1, pattern=r"^[FSGD]+$")
    """A letter a layer: F attends to everything, S to a sliding window, G is Gated DeltaNet, D is SimpleGDN."""
    window: int = Field(256, ge=1)
    """Keys that a query of an S layer sees, itself included [tokens]; 4096 in the report."""
    rotates_delta: bool = False
    """Whether G and D layers rotate queries and keys as attention did; not published."""
    simple_decay: float = Field(1.0, gt=0, le=1)
    """Share of its state that a D layer keeps from token to token; the form is not published."""
    simple_beta: float = Field(1.0, gt=0, lt=2)
    """Share of a key's old value that a D layer replaces; the form is not published."""
    chunk_tokens: int = Field(64, ge=1)
    """Tokens that G and D layers compute at once in training [tokens]; time and memory, not results."""


def _check_pattern(pattern: AttentionPattern, num_layers: int) -> None:
    if len(pattern.layers) != num_layers:
        raise ValueError(
            f"pattern.layers={pattern.layers!r} names {len(pattern.layers)} layers, but "
            f"num_hidden_layers={num_layers}; give one letter a layer"
        )


class GlmHybridConfig(GlmMoeDsaConfig):
    """GLM-5 family without indexers, and with other attention in some layers. ``index_*`` have no effect."""

    # A narrower type than the base's, so that the families form one discriminated union.
    family: Literal["glm_hybrid"] = "glm_hybrid"  # type: ignore[assignment]
    """Which architecture this is."""
    pattern: AttentionPattern
    """What attends in each layer."""

    @model_validator(mode="after")
    def _pattern_fits(self) -> Self:
        _check_pattern(self.pattern, self.num_hidden_layers)
        return self


class LlamaHybridConfig(LlamaConfig):
    """Llama-type decoder with other attention in some layers."""

    family: Literal["llama_hybrid"] = "llama_hybrid"  # type: ignore[assignment]
    """Which architecture this is."""
    pattern: AttentionPattern
    """What attends in each layer."""

    @model_validator(mode="after")
    def _pattern_fits(self) -> Self:
        _check_pattern(self.pattern, self.num_hidden_layers)
        return self

    @model_validator(mode="after")
    def _computes_in_float32(self) -> Self:
        if self.compute_dtype != "float32":
            raise ValueError(
                f"compute_dtype={self.compute_dtype!r} is built for family 'llama' only; leave it out for a "
                f"{self.family} model"
            )
        return self


HybridConfig: TypeAlias = GlmHybridConfig | LlamaHybridConfig
"""A model in which not every layer attends to everything."""

ModelConfig: TypeAlias = Annotated[
    GlmMoeDsaConfig | LlamaConfig | GlmHybridConfig | LlamaHybridConfig | TransformersConfig,
    Field(discriminator="family"),
]
"""Any model LongArc can build."""
