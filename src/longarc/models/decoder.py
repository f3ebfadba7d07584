"""The GLM-5 family: MLA with sparse attention, and experts behind the leading dense layers."""

from jaxtyping import Float, Int
from torch import Tensor

from longarc.config.model import GlmMoeDsaConfig
from longarc.models.decoder_base import Decoder, DecoderLayer, DecoderStack, LayerOutput, Pass
from longarc.models.kernels.decode import NativeGlmMoeDsa
from longarc.models.layers import Linear, RMSNorm, Rotation, SwiGLU
from longarc.models.mla import SparseLatentAttention
from longarc.models.moe import MixtureOfExperts
from longarc.models.selection import Selection


class GlmMoeDsaLayer(DecoderLayer):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, config: GlmMoeDsaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = SparseLatentAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp: SwiGLU | MixtureOfExperts = (
            SwiGLU(config.hidden_size, config.intermediate_size)
            if layer < config.first_k_dense_replace
            else MixtureOfExperts(config)
        )

    def forward(
        self, hidden: Float[Tensor, "rows hidden"], step: Pass, selection: Selection | None = None
    ) -> LayerOutput:
        """Apply the layer to all rows."""
        normed = self.input_layernorm(hidden)
        attended, indexer_loss, selection = self.self_attn(normed, step, selection)
        hidden = hidden + attended
        normed = self.post_attention_layernorm(hidden)
        if isinstance(self.mlp, SwiGLU):
            return LayerOutput(hidden + self.mlp(normed), indexer_loss, selection=selection)
        mixed, counts = self.mlp(normed, step.num_tokens, int4_group_size=step.int4_group_size)
        return LayerOutput(hidden + mixed, indexer_loss, counts, selection)


class GlmMoeDsa(Decoder):
    """GLM-5: Hugging Face ``GlmMoeDsaForCausalLM``, names included."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.config: GlmMoeDsaConfig = config
        self.model = DecoderStack(
            config, [GlmMoeDsaLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def cache_widths(self) -> dict[str, int]:
        """Return the widths of latent rows and indexer keys."""
        return {
            "latent": self.config.kv_lora_rank + self.config.qk_rope_head_dim,
            "index_keys": self.config.index_head_dim,
        }

    def cache_layers(self) -> dict[str, tuple[int, ...]]:
        """Return the layers with indexer keys: those that have an indexer."""
        return {"index_keys": self.config.indexed_layers}

    def rotation(self, positions: Int[Tensor, " rows"]) -> Rotation:
        """Return the interleaved rotation that attention and indexer share."""
        return Rotation(
            positions,
            width=self.config.qk_rope_head_dim,
            base=self.config.rope_theta,
            interleaved=True,
            dtype=self.output_weight.dtype,
        )

    def _native_cache(self, num_slots: int, max_length: int) -> NativeGlmMoeDsa:
        return NativeGlmMoeDsa(
            self._weights(),
            self._angles(max_length),
            self.config,
            num_slots=num_slots,
            max_length=max_length,
        )
