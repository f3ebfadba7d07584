"""What the models of each family are made of, read from a Hugging Face ``config.json``.

More families than LongArc builds: the arithmetic of a published config needs no code of its layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from longarc.errors import ConfigError
from longarc.models.elders.chatglm_config import glm_config, read_chatglm_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters that occur in several copies of one size: a layer's attention, an expert, ..."""

    name: str
    size: int
    """Parameters of one copy."""
    copies: int
    """Copies in the main model."""
    copies_per_token: int
    """Copies of the main model that take part in computing one token; a table look-up is no computation."""
    mtp_copies: int = 0
    """Copies in the layers for multi-token prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRead:
    """What a token computes for each key in its context."""

    name: str
    flops_per_key: int
    """All layers of the main model together [FLOP]."""
    max_keys: int | None = None
    """Keys a token reads at most [tokens]; None = its whole context."""

    def num_keys(self, context_length: int) -> int:
        """Return how many of ``context_length`` keys a token reads."""
        return context_length if self.max_keys is None else min(context_length, self.max_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a model, and what a token leaves behind and reads."""

    family: str
    parts: tuple[Part, ...]
    num_layers: int
    """Layers of the main model."""
    num_mtp_layers: int
    """Layers for multi-token prediction, stored behind them."""
    num_router_biases: int
    """Buffers that correct the choice of experts; no parameters, and in no count."""
    cache: Mapping[str, int]
    """Numbers that a token leaves in the cache of the main model, by kind; all layers together."""
    mtp_cache: int
    """Numbers that a token leaves in the cache of the layers for multi-token prediction."""
    reads: tuple[ContextRead, ...]
    max_context: int
    """Longest context [tokens]."""


def anatomy_of(raw: Mapping[str, Any]) -> Anatomy:
    """Return what the model of a ``config.json`` is made of.

    Raises:
        ConfigError: the family is not known here, or a field is missing or wrong.
    """
    if raw.get("model_type") == "chatglm":
        raw = glm_config(read_chatglm_config(raw))
    family = _FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ConfigError(
            f"model_type {raw.get('model_type')!r} in config.json cannot be counted; known: "
            f"{', '.join(sorted([*_FAMILIES, 'chatglm']))}"
        )
    shape, anatomy = family
    try:
        # A null says the same as a field that is not there: the family's default.
        return anatomy(shape(**{name: value for name, value in raw.items() if value is not None}))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        raise ConfigError(
            f"config.json does not describe a model of type {raw['model_type']}: {wrong}"
        ) from error


class _Shape(BaseModel):
    """Fields that all families have; a config.json holds many more that nothing here depends on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False
    attention_bias: bool = False


class _GroupedShape(_Shape):
    """Grouped-query attention."""

    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    use_qk_norm: bool = False
    mlp_bias: bool = False

    @model_validator(mode="after")
    def _heads_fit(self) -> "_GroupedShape":
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                f"{self.num_attention_heads}; the config needs head_dim"
            )
        return self

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class _ExpertShape(_Shape):
    """A mixture of experts behind leading dense layers."""

    moe_intermediate_size: PositiveInt
    n_routed_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    n_shared_experts: int = Field(1, ge=0)
    first_k_dense_replace: int = Field(ge=0)
    moe_layer_freq: Literal[1] = 1
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    num_nextn_predict_layers: int = Field(0, ge=0)

    @property
    def num_dense_layers(self) -> int:
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types.count("dense")
        return min(self.first_k_dense_replace, self.num_hidden_layers)


class _LatentShape(_ExpertShape):
    """Multi-head latent attention."""

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class _IndexedShape(_LatentShape):
    """Latent attention over the keys that an indexer selects."""

    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt
    index_topk_freq: PositiveInt = 1
    index_skip_topk_offset: int = 2
    index_topk_pattern: str | None = Field(None, pattern="^[FS]+$")
    indexer_types: tuple[Literal["full", "shared"], ...] | None = None

    @property
    def num_indexers(self) -> int:
        """Layers with an indexer of their own; the others reuse the selection of the last such layer.

        Source: IndexCache, arXiv:2603.12201; the fields are those of GLM-5.2's config.json.
        """
        if self.indexer_types is not None:
            return self.indexer_types.count("full")
        if self.index_topk_pattern is not None:
            return self.index_topk_pattern.count("F")
        behind_offset = (
            max(layer - self.index_skip_topk_offset + 1, 0)
            for layer in range(self.num_hidden_layers)
        )
        return sum(position % self.index_topk_freq == 0 for position in behind_offset)


class _MoeGroupedShape(_GroupedShape, _ExpertShape):
    """Grouped-query attention and a mixture of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """One layer's attention."""

    size: int
    cache: Mapping[str, int]
    flops_per_key: int
    num_layer_norms: int = 2
    indexer: "_Indexer | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexer:
    """One indexer."""

    size: int
    copies: int
    key_width: int
    flops_per_key: int
    num_selected: int


def _grouped_attention(shape: _GroupedShape, *, output_bias: bool = False) -> _Attention:
    queries, keys = (
        shape.num_attention_heads * shape.width,
        shape.key_heads * shape.width,
    )
    biases = shape.attention_bias * (queries + 2 * keys + output_bias * shape.hidden_size)
    return _Attention(
        size=2 * shape.hidden_size * (queries + keys)
        + biases
        + shape.use_qk_norm * 2 * shape.width,
        cache={"keys and values": 2 * keys},
        flops_per_key=4 * queries,
    )


def _latent_attention(shape: _LatentShape, indexer: _Indexer | None = None) -> _Attention:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    latent_row = shape.kv_lora_rank + shape.qk_rope_head_dim
    biases = shape.attention_bias * (shape.q_lora_rank + latent_row + hidden)
    size = (
        hidden * shape.q_lora_rank
        + shape.q_lora_rank * heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        + hidden * latent_row
        + shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        + heads * shape.v_head_dim * hidden
        + (shape.q_lora_rank + shape.kv_lora_rank)  # the norms of both latents
        + biases
    )
    return _Attention(
        size=size,
        cache={"latent rows": latent_row},
        # Absorbed form: a head compares with the whole row and adds up its latent part.
        flops_per_key=2 * heads * (latent_row + shape.kv_lora_rank),
        indexer=indexer,
    )


def _indexer(shape: _IndexedShape) -> _Indexer:
    queries = shape.index_n_heads * shape.index_head_dim
    projections = shape.q_lora_rank * queries + shape.hidden_size * (
        shape.index_head_dim + shape.index_n_heads
    )
    return _Indexer(
        size=projections + 2 * shape.index_head_dim,  # a LayerNorm has weight and bias
        copies=shape.num_indexers,
        key_width=shape.index_head_dim,
        flops_per_key=2 * shape.index_n_heads * (shape.index_head_dim + 1),
        num_selected=shape.index_topk,
    )


def _frame(shape: _Shape, attention: _Attention, *, mtp: int) -> list[Part]:
    """Return what every decoder has around its feed-forwards."""
    table, layers = shape.vocab_size * shape.hidden_size, shape.num_hidden_layers
    tied = shape.tie_word_embeddings
    parts = [Part(name="embedding", size=table, copies=1, copies_per_token=int(tied))]
    if not tied:
        parts.append(Part(name="output head", size=table, copies=1, copies_per_token=1))
    norms = attention.num_layer_norms * shape.hidden_size
    parts += [
        _everywhere("attention", attention.size, layers, mtp),
        _everywhere("norms of a layer", norms, layers, mtp),
        _everywhere("final norm", shape.hidden_size, 1),
    ]
    if attention.indexer is not None:
        parts.append(_everywhere("indexer", attention.indexer.size, attention.indexer.copies, mtp))
    if mtp:
        # The projection of embedding and hidden state, the norms of both, and the norm before the head.
        joint = 2 * shape.hidden_size * shape.hidden_size + 3 * shape.hidden_size
        parts.append(_everywhere("MTP projection, norms", joint, 0, mtp))
    return parts


def _everywhere(name: str, size: int, copies: int, mtp_copies: int = 0) -> Part:
    """Return a part all of whose copies every token uses."""
    return Part(name=name, size=size, copies=copies, copies_per_token=copies, mtp_copies=mtp_copies)


def _anatomy(
    family: str,
    shape: _Shape,
    attention: _Attention,
    feed_forwards: list[Part],
    *,
    mtp: int = 0,
    num_router_biases: int = 0,
) -> Anatomy:
    layers, indexer = shape.num_hidden_layers, attention.indexer
    cache = {kind: width * layers for kind, width in attention.cache.items()}
    mtp_cache = mtp * sum(attention.cache.values())
    reads = [
        ContextRead(
            name="attention",
            flops_per_key=attention.flops_per_key * layers,
            max_keys=None if indexer is None else indexer.num_selected,
        )
    ]
    if indexer is not None:
        cache["index keys"] = indexer.key_width * indexer.copies
        mtp_cache += mtp * indexer.key_width
        reads.append(
            ContextRead(name="indexer", flops_per_key=indexer.flops_per_key * indexer.copies)
        )
    return Anatomy(
        family=family,
        parts=(*_frame(shape, attention, mtp=mtp), *feed_forwards),
        num_layers=layers,
        num_mtp_layers=mtp,
        num_router_biases=num_router_biases,
        cache=cache,
        mtp_cache=mtp_cache,
        reads=tuple(reads),
        max_context=shape.max_position_embeddings,
    )


def _dense_parts(shape: _Shape, *, num_layers: int, mlp_bias: bool = False) -> list[Part]:
    size = 3 * shape.hidden_size * shape.intermediate_size
    biases = mlp_bias * (2 * shape.intermediate_size + shape.hidden_size)
    return [_everywhere("dense feed-forward", size + biases, num_layers)] if num_layers else []


def _expert_parts(shape: _ExpertShape) -> list[Part]:
    mtp = shape.num_nextn_predict_layers
    sparse = shape.num_hidden_layers - shape.num_dense_layers
    expert = 3 * shape.hidden_size * shape.moe_intermediate_size
    parts = _dense_parts(shape, num_layers=shape.num_dense_layers)
    parts.append(
        Part(
            name="routed expert",
            size=expert,
            copies=shape.n_routed_experts * sparse,
            copies_per_token=shape.num_experts_per_tok * sparse,
            mtp_copies=shape.n_routed_experts * mtp,
        )
    )
    if shape.n_shared_experts:
        shared = expert * shape.n_shared_experts
        parts.append(_everywhere("shared experts", shared, sparse, mtp))
    router = shape.n_routed_experts * shape.hidden_size
    parts.append(_everywhere("router", router, sparse, mtp))
    return parts


def _mixture(family: str, shape: _ExpertShape, attention: _Attention) -> Anatomy:
    mtp = shape.num_nextn_predict_layers
    num_routers = shape.num_hidden_layers - shape.num_dense_layers + mtp
    return _anatomy(
        family,
        shape,
        attention,
        _expert_parts(shape),
        mtp=mtp,
        num_router_biases=num_routers * shape.n_routed_experts,
    )


def _glm_moe_dsa(shape: _IndexedShape) -> Anatomy:
    indexer = _indexer(shape)
    is_shared = indexer.copies < shape.num_hidden_layers
    indexers = "indexers shared between layers" if is_shared else "an indexer in every layer"
    return _mixture(
        f"GLM-5: latent attention, sparse ({indexers}), mixture of experts",
        shape,
        _latent_attention(shape, indexer),
    )


def _glm4_moe_lite(shape: _LatentShape) -> Anatomy:
    family = "GLM-4.7-Flash: latent attention, mixture of experts"
    return _mixture(family, shape, _latent_attention(shape))


def _glm4_moe(shape: _MoeGroupedShape) -> Anatomy:
    family = "GLM-4.5 to 4.7: grouped-query attention, mixture of experts"
    return _mixture(family, shape, _grouped_attention(shape))


def _dense(family: str, shape: _GroupedShape, attention: _Attention) -> Anatomy:
    parts = _dense_parts(shape, num_layers=shape.num_hidden_layers, mlp_bias=shape.mlp_bias)
    return _anatomy(family, shape, attention, parts)


def _glm(shape: _GroupedShape) -> Anatomy:
    family = "GLM-4-9B, ChatGLM2 and 3: grouped-query attention, dense"
    return _dense(family, shape, _grouped_attention(shape))


def _glm4(shape: _GroupedShape) -> Anatomy:
    family = "GLM-4-0414 and Z1: grouped-query attention, dense, norms around each part"
    attention = replace(_grouped_attention(shape), num_layer_norms=4)
    return _dense(family, shape, attention)


def _llama(shape: _GroupedShape) -> Anatomy:
    family = "Llama: grouped-query attention, dense"
    return _dense(family, shape, _grouped_attention(shape, output_bias=True))


_FAMILIES: Mapping[str, tuple[type[BaseModel], Callable[[Any], Anatomy]]] = {
    "glm_moe_dsa": (_IndexedShape, _glm_moe_dsa),
    "glm4_moe_lite": (_LatentShape, _glm4_moe_lite),
    "glm4_moe": (_MoeGroupedShape, _glm4_moe),
    "glm": (_GroupedShape, _glm),
    "glm4": (_GroupedShape, _glm4),
    "llama": (_GroupedShape, _llama),
}
