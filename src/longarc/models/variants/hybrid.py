"""Decoders in which a pattern says for each layer what attends: everything, a window, or the delta rule.

Training is exact for packed documents and shared prompts, as in the other decoders. Inference goes the
eager way: the native decode kernels know full and sparse attention only.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longarc.config.model import GlmHybridConfig, LlamaHybridConfig
from longarc.errors import ContractError
from longarc.models.cache import CacheShape, PagedCache, RowRounding
from longarc.models.decoder import GlmMoeDsa, GlmMoeDsaLayer
from longarc.models.decoder_base import Attention, Decoder, LayerOutput, Pass
from longarc.models.layers import SwiGLU
from longarc.models.llama import Llama
from longarc.models.selection import Selection
from longarc.models.variants.grouped import FullGroupedAttention, grouped_attention
from longarc.models.variants.latent import LatentAttention, latent_attention
from longarc.models.variants.memory import HybridCache, MemoryShape


class Hybrid(Decoder):
    """What both hybrids share: a cache that holds rows for some layers and memories for the others."""

    def memories(self) -> dict[int, MemoryShape]:
        """Return what the layers that do not attend remember of a sequence."""
        mixers = [
            module
            for module in self.model.modules()
            if isinstance(module, LatentAttention | FullGroupedAttention)
        ]
        shapes = [mixer.memory_shape for mixer in mixers]
        return {layer: shape for layer, shape in enumerate(shapes) if shape is not None}

    def fp8_rows(self) -> Mapping[str, RowRounding]:
        """Refuse: what layers remember in place of rows would stay whole.

        Raises:
            ContractError: always.
        """
        return Decoder.fp8_rows(self)

    def _cache_of(self, shape: CacheShape) -> PagedCache:
        weight = self.output_weight
        return HybridCache(
            self.cache_widths(),
            self.memories(),
            shape,
            num_layers=len(self.model.layers),
            dtype=weight.dtype,
            device=weight.device,
        )

    @torch.no_grad()
    def extend(
        self,
        token_ids: Int[Tensor, " new"],
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        cache: PagedCache,
        *,
        attention: Attention = "sparse",
        ends_only: bool = False,
    ) -> Float[Tensor, "rows hidden"]:
        """Append tokens to cached sequences, each where it stands; see the base class.

        Raises:
            ContractError: as in the base class; or a sequence would go on where its memories do not stand.
        """
        if not isinstance(cache, HybridCache):
            raise ContractError(
                f"a {self.config.family} model computes with the cache that its new_cache() makes, "
                f"not with a {type(cache).__name__}"
            )
        hidden = super().extend(
            token_ids, slots, starts, counts, cache, attention=attention, ends_only=ends_only
        )
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        cache.stand_at(slots, ends)
        return hidden


class GlmHybridLayer(GlmMoeDsaLayer):
    """A layer of the GLM-5 family whose attention the pattern chooses."""

    def __init__(self, config: GlmHybridConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.self_attn: LatentAttention = latent_attention(config, layer)

    def forward(
        self, hidden: Float[Tensor, "rows hidden"], step: Pass, selection: Selection | None = None
    ) -> LayerOutput:
        """Apply the layer to all rows; nothing is selected, and nothing handed on."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), step)
        normed = self.post_attention_layernorm(hidden)
        if isinstance(self.mlp, SwiGLU):
            return LayerOutput(hidden + self.mlp(normed))
        mixed, counts = self.mlp(normed, step.num_tokens, int4_group_size=step.int4_group_size)
        return LayerOutput(hidden + mixed, expert_counts=counts)


class GlmHybrid(Hybrid, GlmMoeDsa):
    """The GLM-5 family without indexers, with a pattern of attention; an MTP layer attends to everything."""

    def __init__(self, config: GlmHybridConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(
            [GlmHybridLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        if self.mtp is not None:
            self.mtp.self_attn.indexer = None

    def cache_widths(self) -> dict[str, int]:
        """Return the width of latent rows."""
        return {"latent": self.config.kv_lora_rank + self.config.qk_rope_head_dim}

    def _drafting_cache_of(self, shape: CacheShape) -> PagedCache:
        # Of the MTP layer's rows alone: `extend` refuses it, as the layers' memories are not in it.
        return self._drafting_rows(shape)


class LlamaHybrid(Hybrid, Llama):
    """A Llama-type decoder with a pattern of attention."""

    def __init__(self, config: LlamaHybridConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = grouped_attention(config, index)
