"""MLA without an indexer: over everything, over a window, or replaced by the delta rule.

Each has the parameters of MLA under the same names, so that weights carry over.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from longarc.config.model import GlmHybridConfig
from longarc.models.attention import dense_attention
from longarc.models.decoder_base import Pass, with_padding
from longarc.models.kernels import attention as native_attention
from longarc.models.mla import SparseLatentAttention, per_head
from longarc.models.variants.delta import delta_attention
from longarc.models.variants.memory import MemoryShape
from longarc.models.variants.windows import windowed_attention


class LatentAttention(SparseLatentAttention):
    """MLA over all earlier tokens."""

    memory_shape: MemoryShape | None = None
    """What the layer remembers of a sequence instead of rows."""

    def __init__(self, config: GlmHybridConfig, layer: int) -> None:
        super().__init__(config, layer)
        del self.indexer

    def forward(  # type: ignore[override]  # without an indexer there is no loss to return
        self, x: Float[Tensor, "T hidden"], step: Pass
    ) -> Float[Tensor, "T hidden"]:
        """Return the attention output."""
        n = step.num_tokens
        w_k_npc, w_v_nvc = torch.split(
            self.kv_b_proj.weight.view(self._num_heads, -1, self._latent),
            [self._nope, self._value],
            dim=1,
        )
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        query_Tnd = self._absorbed_query(q_latent, w_k_npc, step)
        latent = step.table("latent", self._layer, self._latent_rows(x, step)[:n])
        attended_Nnc = self._over(query_Tnd[:n], latent, step)
        output: Tensor = self.o_proj(per_head(with_padding(attended_Nnc, x), w_v_nvc).flatten(1))
        return output

    def _over(self, query_Nnd: Tensor, latent: Tensor, step: Pass) -> Tensor:
        """Attend to the rows that each query sees."""
        key_R1d = latent[:, None]
        if step.flat_runs is not None:
            return native_attention.dense_attention(
                step.flat_runs,
                query_Nnd,
                key_R1d,
                None,
                value_width=self._latent,
                scale=self._scale,
            )
        # The rotated dimensions ride along as values: SDPA wants keys and values of one width.
        attended = dense_attention(query_Nnd, key_R1d, key_R1d, step.plan, scale=self._scale)
        return attended[..., : self._latent]


class WindowLatentAttention(LatentAttention):
    """MLA over a sliding window."""

    def __init__(self, config: GlmHybridConfig, layer: int) -> None:
        super().__init__(config, layer)
        self._window = config.pattern.window

    def _over(self, query_Nnd: Tensor, latent: Tensor, step: Pass) -> Tensor:
        if step.flat_runs is not None:
            return native_attention.window_attention(
                step.flat_runs,
                query_Nnd,
                latent,
                window=self._window,
                value_width=self._latent,
                scale=self._scale,
            )
        key_R1d = latent[:, None]
        attended = windowed_attention(
            query_Nnd, key_R1d, key_R1d, step.plan, window=self._window, scale=self._scale
        )
        return attended[..., : self._latent]


class DeltaLatentAttention(LatentAttention):
    """The delta rule on MLA's queries, and on the keys and values that its latents stand for."""

    def __init__(self, config: GlmHybridConfig, layer: int, *, is_gated: bool) -> None:
        super().__init__(config, layer)
        pattern, heads = config.pattern, config.num_attention_heads
        self._rotates = pattern.rotates_delta
        widths = (self._nope + self._rope, self._value)
        self.delta = delta_attention(
            pattern,
            layer,
            is_gated=is_gated,
            num_heads=heads,
            widths=widths,
            hidden_size=config.hidden_size,
            eps=config.rms_norm_eps,
        )
        self.memory_shape = self.delta.memory_shape

    def forward(  # type: ignore[override]  # as in the base class
        self, x: Float[Tensor, "T hidden"], step: Pass
    ) -> Float[Tensor, "T hidden"]:
        """Return the output of the delta rule."""
        query_Tnk, key_Tnk, value_Tnv = self._projected(x, step)
        n = step.num_tokens
        read_Nnv = self.delta(x, query_Tnk[:n], key_Tnk[:n], value_Tnv[:n], step)
        output: Tensor = self.o_proj(with_padding(read_Nnv, x).flatten(1))
        return output

    def _projected(self, x: Tensor, step: Pass) -> tuple[Tensor, Tensor, Tensor]:
        heads = self._num_heads
        query_Tnk = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(1, (heads, -1))
        c, k_rope = self.kv_a_proj_with_mqa(x).split([self._latent, self._rope], dim=-1)
        expanded_Tnw = self.kv_b_proj(self.kv_a_layernorm(c)).unflatten(1, (heads, -1))
        key_nope, value_Tnv = expanded_Tnw.split([self._nope, self._value], dim=-1)
        key_rope = k_rope[:, None]
        if self._rotates:
            query_nope, query_rope = query_Tnk.split([self._nope, self._rope], dim=-1)
            query_Tnk = torch.cat([query_nope, step.rotation.apply(query_rope)], dim=-1)
            key_rope = step.rotation.apply(key_rope)
        key_Tnk = torch.cat([key_nope, key_rope.expand(-1, heads, -1)], dim=-1)
        return query_Tnk, key_Tnk, value_Tnv


def latent_attention(config: GlmHybridConfig, layer: int) -> LatentAttention:
    """Build what the pattern says for a layer."""
    match config.pattern.layers[layer]:
        case "S":
            return WindowLatentAttention(config, layer)
        case "G" | "D" as letter:
            return DeltaLatentAttention(config, layer, is_gated=letter == "G")
        case _:
            return LatentAttention(config, layer)
