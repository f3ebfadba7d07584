"""The GLM-5 family: MLA with sparse attention, experts behind the leading dense layers, and drafts."""

from collections.abc import Mapping
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from longarc.algos.fp8 import BLOCK_SIZE
from longarc.config.model import GlmMoeDsaConfig
from longarc.errors import ContractError
from longarc.models.cache import PAGE_TOKENS, CacheShape, PagedCache, RowRounding
from longarc.models.decoder_base import (
    Attention,
    Decoder,
    DecoderLayer,
    DecoderStack,
    LayerOutput,
    Pass,
)
from longarc.models.kernels.decode import NativeGlmMoeDsa
from longarc.models.kernels.drafts import DraftingGlmMoeDsa
from longarc.models.kernels.native import native_for
from longarc.models.layers import Linear, RMSNorm, Rotation, SwiGLU, check_ids
from longarc.models.layout import Layout
from longarc.models.mla import SparseLatentAttention
from longarc.models.moe import MixtureOfExperts
from longarc.models.mtp import DraftOutput, MultiTokenPredictor
from longarc.models.room import room_for_rows
from longarc.models.selection import Selection
from longarc.models.sparse_attention import backend_for


class GlmMoeDsaLayer(DecoderLayer):
    """Pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, config: GlmMoeDsaConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
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
        mixed, counts = self.mlp(
            normed,
            step.num_tokens,
            int4_group_size=step.int4_group_size,
            given_Nk=None if step.replay is None else step.replay.experts.get(self._layer),
            note=None
            if step.record is None
            else partial(step.record.experts.__setitem__, self._layer),
        )
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
        # Last, so that a seed draws the same weights for the rest with and without it.
        self.mtp = MultiTokenPredictor(config) if config.num_nextn_predict_layers else None

    def drafts(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        token_ids: Int[Tensor, " tokens"],
        layout: Layout,
        *,
        attention: Attention = "sparse",
        trains_trunk: bool = False,
        with_indexer_loss: bool = False,
        indexer_stride: int = 1,
        int4_group_size: int | None = None,
    ) -> DraftOutput:
        """Compute the drafts of all depths, each from the tokens of the text.

        Args:
            hidden: what ``forward`` returned for the same ids and layout.
            token_ids: of the pack.
            layout: which tokens belong to one sequence.
            attention: as in ``forward``.
            trains_trunk: let gradients reach ``hidden`` and the embedding.
            with_indexer_loss: also compute the loss of the layer's own indexer; needs sparse attention.
            indexer_stride: how many drafts there are for each one that this loss looks at.
            int4_group_size: as in ``forward``.

        Raises:
            ContractError: the model has no layer for drafts, the loss does not go with the attention, states,
                ids and layout disagree, or an id is not in the vocabulary.
        """
        if self.mtp is None:
            raise ContractError(
                "the model has no MTP layer (num_nextn_predict_layers=0), so it cannot draft; add one with "
                "an mtp stage"
            )
        if with_indexer_loss and attention == "dense":
            raise ContractError(
                "with_indexer_loss=True does not go with attention='dense': the layer's indexer learns "
                "from attention over the keys it selected"
            )
        if not len(hidden) == len(token_ids) == layout.num_tokens:
            raise ContractError(
                f"{len(hidden)} states and {len(token_ids)} token ids do not fit a layout of {layout.num_tokens} "
                f"tokens; drafts go on from what forward returned for the same ids and layout"
            )
        check_ids(token_ids, self.config.vocab_size)
        embedding = self.model.embed_tokens.weight
        output: DraftOutput = self.mtp(
            hidden if trains_trunk else hidden.detach(),
            token_ids,
            layout,
            embedding=embedding if trains_trunk else embedding.detach(),
            rotation_of=self.rotation,
            attention=attention,
            with_indexer_loss=with_indexer_loss,
            indexer_stride=indexer_stride,
            int4_group_size=int4_group_size,
        )
        return output

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
            scaling=self.config.rope_scaling,
        )

    def new_drafting_cache(
        self,
        num_slots: int,
        max_length: int,
        *,
        num_pages: int | None = None,
        page_tokens: int = PAGE_TOKENS,
    ) -> PagedCache:
        """Allocate a cache as ``new_cache`` does, in which `longarc.models.drafting` finds what it drafts from.

        Beside the rows of all layers it has those of the MTP layer, and the main model's states.

        Raises:
            ContractError: as for ``new_cache``; or the model cannot draft.
            ResourceError: there is no memory for the rows.
        """
        if self.mtp is None:
            raise ContractError(
                "the model has no MTP layer (num_nextn_predict_layers=0), so it cannot draft; add one with an "
                "mtp stage"
            )
        self._check_length(max_length)
        shape = CacheShape(
            num_slots=num_slots, max_length=max_length, num_pages=num_pages, page_tokens=page_tokens
        )
        with room_for_rows(shape.total_pages * shape.page_tokens):
            return self._drafting_cache_of(shape)

    def _drafting_cache_of(self, shape: CacheShape) -> PagedCache:
        if native_for(*self.parameters()) and backend_for(self.output_weight) == "cpu":
            return DraftingGlmMoeDsa(
                self._weights(), self._angles(shape.max_length), self.config, shape
            )
        return self._drafting_rows(shape)

    def _drafting_rows(self, shape: CacheShape) -> PagedCache:
        behind, weight = self.config.num_hidden_layers, self.output_weight
        return PagedCache(
            {**self.cache_widths(), "states": self.config.hidden_size},
            shape,
            layers={"index_keys": (*self.config.indexed_layers, behind), "states": (behind,)},
            num_layers=behind + 1,
            dtype=weight.dtype,
            device=weight.device,
        )

    def fp8_rows(self) -> Mapping[str, RowRounding]:
        """Return the rounding of latents, whose rotated part stays whole, and of indexer keys, in blocks of 128."""
        return {
            "latent": RowRounding(self.config.kv_lora_rank, BLOCK_SIZE),
            "index_keys": RowRounding(self.config.index_head_dim, BLOCK_SIZE),
        }

    def _native_cache(self, shape: CacheShape) -> NativeGlmMoeDsa:
        return NativeGlmMoeDsa(self._weights(), self._angles(shape.max_length), self.config, shape)
