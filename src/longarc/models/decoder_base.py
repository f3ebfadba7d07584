"""What every decoder is from outside, and the stack of layers that all of them share.

::

    forward  packed tokens + layout          -> hidden      training, scoring
    extend   new tokens of cached sequences  -> hidden      inference; the same layers, the same numbers

A layer sees rows of tokens and a ``Pass``, which says at what positions the rows stand, what each may
attend to, and where keys are kept; it cannot tell training from inference.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longarc.config.model import ComputeDtype, GlmMoeDsaConfig, LlamaConfig, ModelConfig
from longarc.errors import ContractError
from longarc.models.activations import Activations
from longarc.models.cache import PAGE_TOKENS, CacheShape, PagedCache, RowRounding
from longarc.models.kernels.attention import FlatRuns
from longarc.models.kernels.decode import NativeDecoder
from longarc.models.kernels.key_lists import KeyLists
from longarc.models.kernels.native import native_for
from longarc.models.layers import RMSNorm, Rotation, check_ids, pad_rows, padded_rows
from longarc.models.layout import Layout
from longarc.models.plan import AttentionPlan
from longarc.models.projection import project_logits
from longarc.models.room import room_for_rows
from longarc.models.routing import Replay, Routing, RoutingRecord, check_routes
from longarc.models.selection import Selection
from longarc.models.sparse_attention import Backend, backend_for

Attention: TypeAlias = Literal["dense", "sparse"]
IndexerLoss: TypeAlias = Literal["none", "warmup", "sparse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What one pass over packed tokens gives."""

    hidden: Float[Tensor, "tokens hidden"]
    """After the final norm."""
    indexer_loss_sum: Float[Tensor, ""]
    """KL [nats] of indexer against attention, summed over query tokens and indexers, and a mean over the
    layers that use an indexer; carries gradient."""
    num_indexer_terms: int
    """Terms of that sum, query tokens times indexers."""
    expert_counts: Int[Tensor, "moe_layers experts"]
    """Tokens routed to each expert; no rows where the model has no experts."""
    routing: Routing | None = None
    """What each token was routed to; None where nobody asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass through all layers."""

    rotation: Rotation
    num_tokens: int
    """Rows that are tokens; the rest, up to the padded row count, are zeros that nobody attends to."""
    plan: AttentionPlan
    attention: Attention
    backend: Backend
    """What computes sparse attention and key selection."""
    indexer_loss: IndexerLoss = "none"
    indexer_stride: int = 1
    """The sparse indexer loss looks at every ``indexer_stride``-th query."""
    int4_group_size: int | None = None
    """Numbers that share a scale where routed experts compute as INT4; None leaves the weights alone."""
    cache: PagedCache | None = None
    flat_runs: FlatRuns | None = None
    """The plan for the native kernels, where they can do the attention of this pass."""
    key_lists: KeyLists | None = None
    """The plan for Triton's key selection, where that is the back-end."""
    cache_rows: Int[Tensor, " tokens"] | None = None
    """Where the tokens' own rows go in the cache."""
    replay: Replay | None = None
    """Choices of another pass that this one takes over."""
    record: RoutingRecord | None = None
    """Where the choices of this one go."""

    def table(self, name: str, layer: int, rows: Float[Tensor, "tokens width"]) -> Tensor:
        """Return the rows that may be attended to, ``rows`` among them: the packed ones, or the cache."""
        if self.cache is None:
            return rows
        table = self.cache.table(name, layer)
        rounding = self.cache.rounding.get(name)
        table[self.cache_rows] = rows if rounding is None else rounding.rounded(rows)
        return table


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """What a layer returns besides the residual stream it was given."""

    hidden: Float[Tensor, "rows hidden"]
    indexer_loss_sum: Float[Tensor, ""] | None = None
    """KL [nats] of its indexer, or its part of the KL of the indexer whose selection it reuses."""
    expert_counts: Int[Tensor, " experts"] | None = None
    selection: Selection | None = None
    """For the next layer; None where that has an indexer of its own."""


class DecoderLayer(nn.Module):
    """One layer of a decoder."""

    @abstractmethod
    def forward(
        self, hidden: Float[Tensor, "rows hidden"], step: Pass, selection: Selection | None = None
    ) -> LayerOutput:
        """Apply the layer to all rows.

        Args:
            hidden: residual stream.
            step: what all layers of the pass share.
            selection: what the layer before handed over, for a layer without an indexer.
        """


class DecoderStack(nn.Module):
    """Embedding, layers and final norm; the name ``model`` of a Hugging Face state dict."""

    def __init__(
        self, config: GlmMoeDsaConfig | LlamaConfig, layers: Sequence[DecoderLayer]
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, token_ids: Tensor, step: Pass, activations: Activations | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run all rows through all layers; return the rows, indexer losses and expert counts."""
        hidden = self.embed_tokens(token_ids)
        selection: Selection | None = None
        losses, counts = [], []
        layers = self.layers if activations is None else activations.managed(self.layers)
        for layer in layers:
            output: LayerOutput = layer(hidden, step, selection)
            # The rows themselves are not kept: each layer's would stay in memory until the last has run.
            hidden, selection = output.hidden, output.selection
            if output.indexer_loss_sum is not None:
                losses.append(output.indexer_loss_sum)
            if output.expert_counts is not None:
                counts.append(output.expert_counts)
        return self.norm(hidden), losses, counts


class Decoder(nn.Module):
    """A causal language model: ids in, final hidden states out."""

    config: ModelConfig
    model: DecoderStack
    lm_head: nn.Linear | None
    """None where the embedding is the output projection too."""

    @abstractmethod
    def cache_widths(self) -> dict[str, int]:
        """Return the kinds of rows a token leaves in the cache, and their widths."""

    def cache_layers(self) -> dict[str, tuple[int, ...]]:
        """Return which layers leave a kind of rows; a kind that is not named is left by all."""
        return {}

    @abstractmethod
    def rotation(self, positions: Int[Tensor, " rows"]) -> Rotation:
        """Return the rotation of rows at these positions."""

    @property
    def output_weight(self) -> Float[Tensor, "vocab hidden"]:
        """The output projection; logits are ``hidden @ output_weight.T``."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.weight

    @property
    def compute_dtype(self) -> ComputeDtype:
        """What products round their factors to; the output projection's too, which callers compute."""
        return self.config.compute_dtype if isinstance(self.config, LlamaConfig) else "float32"

    def forward(
        self,
        token_ids: Int[Tensor, " tokens"],
        layout: Layout,
        *,
        attention: Attention = "sparse",
        indexer_loss: IndexerLoss = "none",
        indexer_stride: int = 1,
        int4_group_size: int | None = None,
        activations: Activations | None = None,
        replayed: Routing | None = None,
        records_routing: bool = False,
    ) -> ForwardOutput:
        """Compute the hidden state of every token of a packed layout.

        Args:
            token_ids: ids, in the order of the layout's spans.
            layout: which tokens belong to one sequence.
            attention: over all earlier tokens, or over those the indexer selects; a model without an
                indexer is always dense.
            indexer_loss: which distillation loss of the indexer to compute: ``warmup`` against dense
                attention, ``sparse`` against attention over the selected keys.
            indexer_stride: with ``sparse``, how many queries there are for each one that the loss looks at;
                neighbouring queries say nearly the same, and the loss costs as much as the attention.
            int4_group_size: compute with the routed experts rounded to INT4, in groups of that many numbers;
                gradients reach the weights as if nothing had been rounded.
            activations: what becomes of the layers' activations until backward; None keeps them.
            replayed: experts, keys or both of every token, from a pass over the same tokens, in place of what
                router and indexers of this one would choose.
            records_routing: also return what each token was routed to.

        Raises:
            ContractError: ids and layout disagree, an id is not in the vocabulary, a sequence is too
                long for the model, attention and indexer loss do not go together, or the routing is not of this
                model and these tokens.
        """
        num_tokens = len(token_ids)
        if num_tokens != layout.num_tokens:
            raise ContractError(
                f"{num_tokens} token ids do not fit a layout of {layout.num_tokens} tokens"
            )
        check_ids(token_ids, self.config.vocab_size)
        if int4_group_size is not None and not isinstance(self.config, GlmMoeDsaConfig):
            raise ContractError(
                f"int4_group_size={int4_group_size} rounds routed experts of LongArc's own layers, but a "
                f"{self.config.family} model has none; leave it out"
            )
        if indexer_loss != "none" and not self._num_indexers:
            raise ContractError(
                f"indexer_loss={indexer_loss!r} trains indexers, but a {self.config.family} model has none; leave "
                f"it out"
            )
        if indexer_loss != "none" and (indexer_loss == "warmup") != (attention == "dense"):
            raise ContractError(
                f"indexer_loss={indexer_loss!r} does not go with attention={attention!r}: the warm-up "
                f"distils dense attention, the sparse loss sparse attention"
            )
        positions = layout.position_ids()
        self._check_length(int(positions.max()) + 1)
        plan = AttentionPlan.of_layout(layout, token_ids.device)
        if records_routing:
            check_routes(self.config)
        if replayed is not None and replayed.keys is not None and attention == "dense":
            raise ContractError(
                "replayed keys do not go with attention='dense', which reads every key; leave them out"
            )
        record = RoutingRecord() if records_routing else None
        backend = backend_for(self.output_weight)
        step = Pass(
            rotation=self.rotation(self._padded(positions)),
            num_tokens=num_tokens,
            plan=plan,
            backend=backend,
            flat_runs=plan.flat_runs() if native_for(self.output_weight) else None,
            key_lists=self._key_lists(plan, num_tokens, backend),
            attention=attention,
            indexer_loss=indexer_loss,
            indexer_stride=indexer_stride,
            int4_group_size=int4_group_size,
            replay=None
            if replayed is None
            else Replay.of(replayed, self.config, positions.to(token_ids.device)),
            record=record,
        )
        hidden, losses, counts = self.model(self._padded(token_ids), step, activations)
        stride = indexer_stride if indexer_loss == "sparse" else 1
        return ForwardOutput(
            hidden=hidden[:num_tokens],
            indexer_loss_sum=torch.stack(losses).sum() if losses else hidden.new_zeros(()),
            num_indexer_terms=len(range(0, num_tokens, stride)) * self._num_indexers
            if losses
            else 0,
            expert_counts=torch.stack(counts)
            if counts
            else hidden.new_zeros((0, 0), dtype=torch.long),
            routing=None if record is None else record.routing(),
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
        """Append tokens to cached sequences and compute their hidden states.

        Args:
            token_ids: the new tokens, sequence after sequence.
            slots: the cache slot of each sequence.
            starts: the position of each sequence's first new token; rows before it are in the cache.
            counts: how many of the new tokens belong to each sequence.
            cache: is written; made by ``new_cache``.
            attention: as in ``forward``.
            ends_only: return the last new token of each sequence alone; a prefill needs no more, and the
                native kernels spare the others the last layer.

        Raises:
            ContractError: the numbers disagree or do not fit the cache, or an id is not in the
                vocabulary.
        """
        num_tokens = len(token_ids)
        if sum(counts) != num_tokens:
            raise ContractError(
                f"{num_tokens} token ids do not fit counts that sum to {sum(counts)}"
            )
        check_ids(token_ids, self.config.vocab_size)
        cache.check(list(slots), list(starts), list(counts))
        if isinstance(cache, NativeDecoder):
            return cache.hidden(
                token_ids,
                slots,
                starts,
                counts,
                is_sparse=attention == "sparse",
                ends_only=ends_only,
            )
        positions: list[int] = []
        for start, count in zip(starts, counts, strict=True):
            positions.extend(range(start, start + count))
        plan = AttentionPlan.of_cache(cache, slots, starts, counts, device=token_ids.device)
        backend = backend_for(self.output_weight)
        record = None if cache.routed is None else RoutingRecord()
        step = Pass(
            rotation=self.rotation(self._padded(torch.tensor(positions))),
            num_tokens=num_tokens,
            plan=plan,
            attention=attention,
            backend=backend,
            key_lists=self._key_lists(plan, cache.num_rows, backend),
            cache=cache,
            cache_rows=plan.own_rows(token_ids.device),
            record=record,
        )
        hidden, *_ = self.model(self._padded(token_ids), step)
        if record is not None and cache.routed is not None and step.cache_rows is not None:
            cache.routed.put(step.cache_rows.cpu().numpy(), record.routing())
        new_hidden: Tensor = hidden[:num_tokens]
        return new_hidden[torch.tensor(counts).cumsum(0) - 1] if ends_only else new_hidden

    def logits(
        self, hidden: Float[Tensor, "rows hidden"], cache: PagedCache
    ) -> Float[Tensor, "rows vocab"]:
        """Project what ``extend`` returned, with the packed weight that a native cache keeps."""
        if isinstance(cache, NativeDecoder):
            return cache.logits(hidden)
        return project_logits(hidden, self.output_weight, compute_dtype=self.compute_dtype)

    def new_cache(
        self,
        num_slots: int,
        max_length: int,
        *,
        num_pages: int | None = None,
        page_tokens: int = PAGE_TOKENS,
    ) -> PagedCache:
        """Allocate a cache for ``num_slots`` sequences of at most ``max_length`` tokens.

        It belongs to this model: where the native kernels run, it reads the parameters in place and
        notices when they changed.

        Args:
            num_slots: sequences that can be extended.
            max_length: of a sequence [tokens].
            num_pages: pages, which the caller gives to slots; None gives each slot its own.
            page_tokens: positions of a page.

        Raises:
            ContractError: the model's context is shorter, or there can be no such pages.
            ResourceError: there is no memory for the rows.
        """
        self._check_length(max_length)
        shape = CacheShape(
            num_slots=num_slots, max_length=max_length, num_pages=num_pages, page_tokens=page_tokens
        )
        with room_for_rows(shape.total_pages * shape.page_tokens):
            return self._cache_of(shape)

    def shared_cache(self, cache: PagedCache) -> PagedCache:
        """Return the rows and pages of another model's cache for this one, which differs in its weights alone."""
        return cache.under(self._weights())

    def fp8_rows(self) -> Mapping[str, RowRounding]:
        """Return how the rows of a cache are rounded where it is stored in FP8.

        Raises:
            ContractError: nobody stores the rows of such a model so.
        """
        raise ContractError(
            f"the cache of a {self.config.family} model is not rounded to FP8; only those of glm_moe_dsa and of "
            f"Llama-type models are"
        )

    def _cache_of(self, shape: CacheShape) -> PagedCache:
        weight = self.output_weight
        if native_for(*self.parameters()) and backend_for(weight) == "cpu":
            return self._native_cache(shape)
        return PagedCache(
            self.cache_widths(),
            shape,
            layers=self.cache_layers(),
            num_layers=len(self.model.layers),
            dtype=weight.dtype,
            device=weight.device,
        )

    def _key_lists(self, plan: AttentionPlan, num_rows: int, backend: Backend) -> KeyLists | None:
        if backend != "triton":
            return None
        return plan.key_lists(num_rows, self.output_weight.device)

    @abstractmethod
    def _native_cache(self, shape: CacheShape) -> NativeDecoder:
        """Return the cache with which the native kernels compute."""

    def _weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of every position below ``length``.

        The table is padded to whole blocks of rows, as in `forward`, so that the same numbers come out.
        """
        return self.rotation(torch.arange(padded_rows(length))).angles

    @property
    def _num_indexers(self) -> int:
        return len(self.config.indexed_layers) if isinstance(self.config, GlmMoeDsaConfig) else 0

    def _padded(self, rows: Tensor) -> Tensor:
        return pad_rows(rows, padded_rows(len(rows))).to(self.output_weight.device)

    def _check_length(self, length: int) -> None:
        limit = self.config.max_position_embeddings
        if length > limit:
            raise ContractError(
                f"a sequence of {length} tokens exceeds max_position_embeddings={limit}; shorten it, or "
                f"raise the model's context"
            )


def with_padding(rows: Float[Tensor, "tokens ..."], like: Tensor) -> Float[Tensor, "rows ..."]:
    """Bring per-token results back to the padded row count of ``like``."""
    return F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, like.shape[0] - rows.shape[0]])
