"""Llama-type decoders: grouped-query attention and a dense feed-forward, Hugging Face names.

Llama, SmolLM2, Qwen2 and Qwen3 are one model here: what differs is whether projections have biases and heads
of queries and keys a norm. Shape letters: T padded rows, N tokens, n query heads, g key heads, d head width.
"""

from collections.abc import Mapping
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor, nn

from longarc.config.model import LlamaConfig
from longarc.models.attention import dense_attention
from longarc.models.cache import CacheShape, RowRounding
from longarc.models.decoder_base import (
    Decoder,
    DecoderLayer,
    DecoderStack,
    LayerOutput,
    Pass,
    with_padding,
)
from longarc.models.kernels import attention as native_attention
from longarc.models.kernels.decode import NativeLlama
from longarc.models.layers import Linear, RMSNorm, Rotation, SwiGLU
from longarc.models.selection import Selection


def head_width(config: LlamaConfig) -> int:
    """Return the width of one attention head."""
    if config.head_dim is not None:
        return config.head_dim
    return config.hidden_size // config.num_attention_heads


class GroupedQueryAttention(nn.Module):
    """Attention in which several query heads share one key and value head."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self._layer, self._width = layer, head_width(config)
        hidden = config.hidden_size
        queries = config.num_attention_heads * self._width
        keys = config.num_key_value_heads * self._width
        inputs, output = config.attention_bias != "none", config.attention_bias == "all"
        linear = partial(Linear, compute_dtype=config.compute_dtype)
        self.q_proj = linear(hidden, queries, has_bias=inputs)
        self.k_proj = linear(hidden, keys, has_bias=inputs)
        self.v_proj = linear(hidden, keys, has_bias=inputs)
        self.o_proj = linear(queries, hidden, has_bias=output)
        self.q_norm = RMSNorm(self._width, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self._width, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Float[Tensor, "T hidden"], step: Pass) -> Float[Tensor, "T hidden"]:
        """Attend to everything before each token."""
        width, n = self._width, step.num_tokens
        query_Tnd, key_Tgd = (step.rotation.apply(heads) for heads in self._query_and_key(x))
        keys = step.table("keys", self._layer, key_Tgd.flatten(1)[:n])
        values = step.table("values", self._layer, self.v_proj(x)[:n])
        keys, values = keys.view(len(keys), -1, width), values.view(len(values), -1, width)
        scale = float(width) ** -0.5
        if step.flat_runs is not None:
            attended_Nnd = native_attention.dense_attention(
                step.flat_runs, query_Tnd[:n], keys, values, value_width=width, scale=scale
            )
        else:
            attended_Nnd = dense_attention(query_Tnd[:n], keys, values, step.plan, scale=scale)
        output: Tensor = self.o_proj(with_padding(attended_Nnd, x).flatten(1))
        return output

    def _query_and_key(
        self, x: Float[Tensor, "T hidden"]
    ) -> tuple[Float[Tensor, "T n d"], Float[Tensor, "T g d"]]:
        """Return queries and keys before rotation, normalised where the model does that."""
        return (
            self._heads(self.q_proj(x), self.q_norm),
            self._heads(self.k_proj(x), self.k_norm),
        )

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        rows = projected.view(-1, self._width)
        return (rows if norm is None else norm(rows)).view(len(projected), -1, self._width)


class LlamaLayer(DecoderLayer):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = GroupedQueryAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(
            config.hidden_size, config.intermediate_size, compute_dtype=config.compute_dtype
        )

    def forward(
        self, hidden: Float[Tensor, "rows hidden"], step: Pass, selection: Selection | None = None
    ) -> LayerOutput:
        """Apply the layer to all rows."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), step)
        return LayerOutput(hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Llama(Decoder):
    """Hugging Face ``LlamaForCausalLM``, ``Qwen2ForCausalLM`` or ``Qwen3ForCausalLM``, names included."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config: LlamaConfig = config
        self.model = DecoderStack(
            config, [LlamaLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        )

    def cache_widths(self) -> dict[str, int]:
        """Return the widths of key and value rows."""
        width = self.config.num_key_value_heads * head_width(self.config)
        return {"keys": width, "values": width}

    def rotation(self, positions: Int[Tensor, " rows"]) -> Rotation:
        """Return the rotation of pairs (i, i + width/2)."""
        return Rotation(
            positions,
            width=head_width(self.config),
            base=self.config.rope_theta,
            interleaved=False,
            dtype=self.output_weight.dtype,
            scaling=self.config.rope_scaling,
        )

    def fp8_rows(self) -> Mapping[str, RowRounding]:
        """Return the rounding of keys and values, in which each head of a token has its scale."""
        return {
            name: RowRounding(width, head_width(self.config))
            for name, width in self.cache_widths().items()
        }

    def _native_cache(self, shape: CacheShape) -> NativeLlama:
        return NativeLlama(self._weights(), self._angles(shape.max_length), self.config, shape)
