"""Drafts for sequences that are being sampled: what speculative decoding asks of the MTP layer.

::

    main model:  ... t_{n-1}  ->  h_{n-1}  ->  samples t_n                     rows 0 .. n-1 are in the cache
    take         keeps h_p, and leaves the row of depth 1 of t_p and h_{p-1}   at position p, where its token lies
    chain        reads t_n beside h_{n-1}, leaves its row, and drafts t_{n+1}; then reads that one, and so on

The same layer and the same arithmetic as in training. A row depends on no token behind its own, so what sequences
have in common they can share, here as in every other layer. Only depth 1 leaves rows, from states of the main model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.errors import ContractError
from longarc.models.cache import PagedCache
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Attention, Pass
from longarc.models.kernels.drafts import DraftingGlmMoeDsa
from longarc.models.layers import check_ids
from longarc.models.mtp import DraftKeys
from longarc.models.plan import AttentionPlan, QueryRun
from longarc.models.projection import project_logits


@runtime_checkable
class DraftChain(Protocol):
    """Drafts of some sequences, one depth after another."""

    def read(self, token_ids: Int[Tensor, " sequences"]) -> Float[Tensor, "sequences vocab"]:
        """Read a token of each sequence and return the logits of the draft behind it.

        Args:
            token_ids: at first the newest token of each sequence, then what was drafted last. There may be more
                depths than were trained.
        """


@runtime_checkable
class Drafter(Protocol):
    """Drafts from the cache of one model."""

    def take(
        self,
        token_ids: Int[Tensor, " new"],
        hidden: Float[Tensor, "new hidden"],
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Take in tokens that the main model has computed.

        Args:
            token_ids: sequence after sequence.
            hidden: what ``extend`` returned for all of them.
            slots: slot of each sequence.
            starts: position of each sequence's first token; what is before has been taken.
            counts: tokens of each sequence.
        """

    def chain(self, slots: Sequence[int], lengths: Sequence[int], *, is_sparse: bool) -> DraftChain:
        """Begin a chain of drafts for each sequence.

        Args:
            slots: slot of each sequence, with a page for one more token.
            lengths: tokens of each that were taken, at least 1; the next one has been drawn.
            is_sparse: attend to the selection of the layer's indexer only.
        """


def drafter_of(model: GlmMoeDsa, cache: PagedCache) -> Drafter:
    """Return what drafts from a cache that ``new_drafting_cache`` made for the model."""
    return cache if isinstance(cache, DraftingGlmMoeDsa) else EagerDrafter(model, cache)


class EagerDrafter:
    """Drafts in torch; see `Drafter`."""

    def __init__(self, model: GlmMoeDsa, cache: PagedCache) -> None:
        """Draft from the cache of a model.

        Raises:
            ContractError: the model has no MTP layer.
        """
        if model.mtp is None:
            raise ContractError("the model has no MTP layer; `new_drafting_cache` says more")
        self.model = model
        self.cache = cache
        self.predictor = model.mtp
        self.states = cache.table("states", model.config.num_hidden_layers)

    @torch.no_grad()
    def take(
        self,
        token_ids: Int[Tensor, " new"],
        hidden: Float[Tensor, "new hidden"],
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """See `Drafter`."""
        check_ids(token_ids, self.model.config.vocab_size)
        self.cache.check(list(slots), list(starts), list(counts))
        rows = [
            _rows(self.cache, slot, start + count)[start:]
            for slot, start, count in zip(slots, starts, counts, strict=True)
        ]
        self.states[torch.cat(rows).to(hidden.device)] = hidden
        # The first token of a sequence has no state before it.
        is_behind = torch.cat(
            [torch.arange(n) + s > 0 for s, n in zip(starts, counts, strict=True)]
        )
        begun = [
            (slot, max(start, 1), start + count)
            for slot, start, count in zip(slots, starts, counts, strict=True)
            if start + count > 1
        ]
        if not begun:
            return
        places = Places(self.cache, begun, hidden.device)
        self.predictor.leave_keys(
            self.embedded(token_ids[is_behind.to(token_ids.device)], places, 1),
            self.states[places.before],
            self.step(1, places, "sparse"),
        )

    def chain(
        self, slots: Sequence[int], lengths: Sequence[int], *, is_sparse: bool
    ) -> "EagerChain":
        """See `Drafter`."""
        self.cache.check(list(slots), list(lengths), [1] * len(slots))
        begun = [(slot, length, length + 1) for slot, length in zip(slots, lengths, strict=True)]
        places = Places(self.cache, begun, self.states.device)
        return EagerChain(self, places, "sparse" if is_sparse else "dense")

    def step(self, depth: int, places: "Places", attention: Attention) -> Pass:
        """Return the pass of a depth; that of depth 1 writes into the cache."""
        step = self.predictor.step_of(
            depth, places.positions, places.plan, self.model.rotation, attention
        )
        if depth > 1:
            return step
        return replace(step, cache=self.cache, cache_rows=places.own)

    def embedded(self, token_ids: Tensor, places: "Places", depth: int) -> Tensor:
        """Look up the tokens that a depth reads."""
        embedding = self.model.model.embed_tokens.weight
        token_ids = token_ids.to(embedding.device)
        return self.predictor.embedded(token_ids, embedding, places.positions, depth)


class EagerChain:
    """Drafts in torch; see `DraftChain`."""

    def __init__(self, drafter: EagerDrafter, places: "Places", attention: Attention) -> None:
        self._drafter = drafter
        self._places = places
        self._attention = attention
        self._depth = 0
        self._keys: DraftKeys | None = None
        self._fed = drafter.states[places.before]

    @torch.no_grad()
    def read(self, token_ids: Int[Tensor, " sequences"]) -> Float[Tensor, "sequences vocab"]:
        """See `DraftChain`."""
        drafter = self._drafter
        check_ids(token_ids, drafter.model.config.vocab_size)
        self._depth += 1
        output = drafter.predictor.depth(
            drafter.embedded(token_ids, self._places, self._depth),
            self._fed,
            drafter.step(self._depth, self._places, self._attention),
            self._keys,
        )
        self._keys, self._fed = output.keys, output.fed
        return project_logits(output.hidden, drafter.model.output_weight)


class Places:
    """Where tokens of some sequences stand, of which depth 1 leaves rows; none is the first of its sequence."""

    def __init__(
        self, cache: PagedCache, begun: Sequence[tuple[int, int, int]], device: torch.device
    ) -> None:
        """Find the rows.

        Args:
            cache: of the model.
            begun: slot of each sequence, and its tokens as first position and the one behind the last.
            device: where positions and rows go.
        """
        runs: list[QueryRun] = []
        positions: list[int] = []
        before: list[Tensor] = []
        for slot, start, stop in begun:
            rows = _rows(cache, slot, stop)
            # There is nothing at position 0, so that what a query sees begins with the row after it.
            runs.append(QueryRun(len(positions), stop - start, start - 1, rows[1:].to(device)))
            positions += range(start - 1, stop - 1)
            before.append(rows[start - 1 : stop - 1])
        self.plan = AttentionPlan(tuple(runs))
        self.positions = torch.tensor(positions, device=device)
        """Of the states that the tokens go on from."""
        self.before = torch.cat(before).to(device)
        """Rows of these states."""
        self.own = self.plan.own_rows(device)
        """Rows of the tokens."""


def _rows(cache: PagedCache, slot: int, length: int) -> Int[Tensor, " length"]:
    rows = cache.rows_of(slot, length)
    return torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
