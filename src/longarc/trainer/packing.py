"""From token sequences to micro-batches: which tokens lie where, and which row predicts which token.

A micro-batch is one packed token axis. Sequences that begin alike (the rollouts of one task, the
branches of one trajectory, tasks with one system prompt) share the rows of their common beginning::

    sequence 0   P P P P a b c        packed   P P P P | a b c | x y
    sequence 1   P P P P x y          spans    0         1(0)    2(0)

The row of a token predicts the token after it, so the last P predicts both ``a`` and ``x``: it is
listed twice in ``source_rows``. Rows are gathered by these lists before the projection to the
vocabulary, so that only trained tokens are projected.

Where the routing of tokens is replayed, a row has one: sequences share their beginning as far as that is the same too.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from longarc.errors import ConfigError, ContractError
from longarc.models.layout import Layout, Span

Ids: TypeAlias = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 16
"""A common beginning shorter than this is computed again for each sequence: many tiny spans cost more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A token sequence and which of its tokens are trained."""

    token_ids: Sequence[int]
    train_mask: Sequence[bool] | None = None
    """True where the token is trained on; None trains on all. The first token has no predecessor and
    is never a target."""
    routing: Sequence[bytes] | None = None
    """What each token is to be routed to, in the bytes of ``longarc.models.routed_rows``; None where the model
    chooses."""

    def __post_init__(self) -> None:
        if self.train_mask is not None and len(self.train_mask) != len(self.token_ids):
            raise ContractError(
                f"a document has {len(self.token_ids)} tokens but a train_mask of "
                f"{len(self.train_mask)}; they must be aligned"
            )
        if self.routing is not None and len(self.routing) != len(self.token_ids):
            raise ContractError(
                f"a document has {len(self.token_ids)} tokens but the routing of {len(self.routing)}; they must be "
                f"aligned"
            )

    def target_positions(self) -> Ids:
        """Return the positions of trained tokens, ascending."""
        if self.train_mask is None:
            return np.arange(1, len(self.token_ids), dtype=np.int64)
        mask = np.asarray(self.train_mask, dtype=bool)
        return np.flatnonzero(mask[1:]).astype(np.int64) + 1


D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward and backward. ``targets`` counts (sequence, trained token) pairs."""

    token_ids: Int[Tensor, " tokens"]
    layout: Layout
    source_rows: Int[Tensor, " targets"]
    """Row of the packed axis whose hidden state predicts the target."""
    target_ids: Int[Tensor, " targets"]
    """Vocabulary id of the target."""
    sequence_indices: Int[Tensor, " targets"]
    """Which of the given sequences the target belongs to."""
    positions: Int[Tensor, " targets"]
    """Position of the target in its sequence."""
    routing: Sequence[bytes] | None = None
    """What each packed token is to be routed to; None where the model chooses."""


def pack_shared(documents: Sequence[Document], *, micro_batch_tokens: int) -> list[MicroBatch]:
    """Lay out sequences in their order, computing what they share at the beginning once.

    Sequences of one group should follow each other: a shared beginning is computed once for each
    micro-batch that needs it. Tokens after a sequence's last target predict nothing that is trained
    and are left out; sequences without any target are left out whole.

    Raises:
        ConfigError: a sequence is longer than ``micro_batch_tokens``.
    """
    bins: list[list[_Sequence]] = []
    room = 0
    for sequence in _sequences(documents, micro_batch_tokens):
        num_new = _num_new_tokens(sequence, bins[-1]) if bins else 0
        if not bins or num_new > room:
            bins.append([])
            room = micro_batch_tokens
            num_new = len(sequence.inputs)
        bins[-1].append(sequence)
        room -= num_new
    return [_lay_out_as_forest(members) for members in bins]


def split_documents(
    documents: Sequence[D],
    *,
    num_shards: int,
    micro_batch_tokens: int,
    keys_per_row: float = math.inf,
) -> list[list[D]]:
    """Deal documents to shards that take about as long, those that begin alike together.

    Sorted by their tokens, each document shares most with its neighbours. Those that share half of what
    they are stay together, unless they are more than one shard's part. Documents without a target are
    left out, and few documents leave shards empty.

    Args:
        documents: in any order.
        num_shards: lists to return.
        micro_batch_tokens: as in :func:`pack_shared`.
        keys_per_row: keys whose attention takes as long as the rest of a row's way through the layers.

    Raises:
        ConfigError: a sequence is longer than ``micro_batch_tokens``.
    """
    sequences = sorted(
        _sequences(documents, micro_batch_tokens), key=lambda sequence: sequence.identity.tobytes()
    )
    shared = _shared_with_previous(sequences)
    costs = [
        _cost(sequence, num_shared, keys_per_row)
        for sequence, num_shared in zip(sequences, shared, strict=True)
    ]
    starts = [i for i, n in enumerate(shared) if 2 * n < len(sequences[i].inputs)]
    families = itertools.starmap(range, itertools.pairwise([*starts, len(sequences)]))
    parts = [part for family in families for part in _cut(family, costs, sum(costs) / num_shards)]
    # The longest first, each to the shard that has least: the classic way to finish together.
    loads = [0] * num_shards
    members: list[list[int]] = [[] for _ in range(num_shards)]
    for part in sorted(parts, key=lambda part: -_total(part, costs)):
        shard = loads.index(min(loads))
        loads[shard] += _total(part, costs)
        members[shard] += part
    return [[documents[sequences[i].index] for i in sorted(shard)] for shard in members]


def _cost(sequence: "_Sequence", num_shared: int, keys_per_row: float) -> int:
    """Return how long a sequence takes of which ``num_shared`` rows are there already."""
    length = len(sequence.inputs)
    num_keys = (length**2 - num_shared**2) / 2
    rows = length - num_shared + num_keys / keys_per_row
    # A row's way through the layers takes about twice as long as a target's through the vocabulary.
    return round(2 * rows) + len(sequence.target_ids)


def _total(part: range, costs: Sequence[int]) -> int:
    return sum(costs[part.start : part.stop])


def _cut(part: range, costs: Sequence[int], limit: float) -> list[range]:
    """Halve a part until none takes longer than ``limit`` or consists of more than one sequence."""
    if len(part) == 1 or _total(part, costs) <= limit:
        return [part]
    middle = len(part) // 2
    return [*_cut(part[:middle], costs, limit), *_cut(part[middle:], costs, limit)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequence:
    """A document as arrays, without the tokens that predict nothing."""

    index: int
    inputs: Ids
    identity: Ids
    """Equal where a row can be shared: the tokens, or where routing is replayed a number for token and routing."""
    positions: Ids
    target_ids: Ids
    routing: Sequence[bytes] | None


def _sequences(documents: Sequence[Document], micro_batch_tokens: int) -> list[_Sequence]:
    if len({document.routing is None for document in documents}) > 1:
        raise ContractError(
            "some documents have the routing of their tokens and some have none; replay that of all, or of none"
        )
    sequences = []
    numbers: dict[tuple[int, bytes], int] = {}
    for index, document in enumerate(documents):
        positions = document.target_positions()
        if len(positions) == 0:
            continue
        token_ids = np.asarray(document.token_ids, dtype=np.int64)
        num_inputs = int(positions[-1])
        if num_inputs > micro_batch_tokens:
            raise ConfigError(
                f"sequence {index} has {num_inputs} tokens to compute, more than "
                f"micro_batch_tokens={micro_batch_tokens}; raise micro_batch_tokens or shorten the context"
            )
        sequences.append(
            _Sequence(
                index=index,
                inputs=token_ids[:num_inputs],
                identity=_identity(document, num_inputs, token_ids, numbers),
                positions=positions,
                target_ids=token_ids[positions],
                routing=None if document.routing is None else document.routing[:num_inputs],
            )
        )
    return sequences


def _identity(
    document: Document, num_inputs: int, token_ids: Ids, numbers: dict[tuple[int, bytes], int]
) -> Ids:
    """Return what two sequences have in common where a row of one can serve the other."""
    if document.routing is None:
        return token_ids[:num_inputs]
    pairs = zip(document.token_ids, document.routing[:num_inputs], strict=False)
    return np.asarray([numbers.setdefault(pair, len(numbers)) for pair in pairs], dtype=np.int64)


def _common_prefix(a: Ids, b: Ids) -> int:
    """Return how many tokens two sequences share at their beginning."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _shared_with_previous(sequences: Sequence[_Sequence]) -> list[int]:
    pairs = itertools.pairwise(sequences)
    return [0, *(_common_prefix(a.identity, b.identity) for a, b in pairs)][: len(sequences)]


def _num_new_tokens(sequence: _Sequence, members: Sequence[_Sequence]) -> int:
    """Return an upper bound of the rows that ``sequence`` adds to the forest of ``members``.

    A split is only made where at least MIN_SHARED_TOKENS are shared beyond the span above it, so up
    to MIN_SHARED_TOKENS - 1 of a common beginning may be computed twice.
    """
    shared = max((_common_prefix(sequence.identity, m.identity) for m in members), default=0)
    return len(sequence.inputs) - max(0, shared - (MIN_SHARED_TOKENS - 1))


def _lay_out_as_forest(members: Sequence[_Sequence]) -> MicroBatch:
    forest = _Forest()
    rows: dict[int, Ids] = {}
    forest.grow(list(members), 0, None, np.empty(0, dtype=np.int64), rows)
    return _micro_batch(forest, members, [rows[member.index] for member in members])


def _micro_batch(
    forest: "_Forest", members: Sequence[_Sequence], rows: Sequence[Ids]
) -> MicroBatch:
    """Turn the rows of each member into the lists of what predicts what."""
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate(forest.pieces)),
        layout=Layout(tuple(forest.spans)),
        source_rows=torch.from_numpy(
            np.concatenate([r[m.positions - 1] for r, m in zip(rows, members, strict=True)])
        ),
        target_ids=torch.from_numpy(np.concatenate([m.target_ids for m in members])),
        sequence_indices=torch.from_numpy(
            np.concatenate([np.full(len(m.positions), m.index, dtype=np.int64) for m in members])
        ),
        positions=torch.from_numpy(np.concatenate([m.positions for m in members])),
        routing=None if members[0].routing is None else forest.routing,
    )


class _Forest:
    """Spans under construction, in packed order."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.pieces: list[Ids] = []
        self.routing: list[bytes] = []
        self._num_tokens = 0

    def add(self, sequence: _Sequence, start: int, end: int, parent: int | None) -> tuple[int, Ids]:
        """Append positions ``start`` to ``end`` of a sequence as one span; return its index and its rows."""
        token_ids = sequence.inputs[start:end]
        rows = np.arange(self._num_tokens, self._num_tokens + len(token_ids), dtype=np.int64)
        if sequence.routing is not None:
            self.routing += sequence.routing[start:end]
        self.spans.append(Span(len(token_ids), parent))
        self.pieces.append(token_ids)
        self._num_tokens += len(token_ids)
        return len(self.spans) - 1, rows

    def grow(
        self,
        members: list[_Sequence],
        start: int,
        parent: int | None,
        path: Ids,
        rows: dict[int, Ids],
    ) -> None:
        """Place the tokens of ``members`` from position ``start`` on, all behind span ``parent``.

        Args:
            members: sequences that are equal before ``start``.
            start: first position that has no row yet.
            parent: span that holds the token before ``start``; None at the beginning.
            path: rows of the tokens before ``start``.
            rows: receives the rows of each finished member, by its index.
        """
        first = members[0]
        end = min(_common_prefix(first.identity, member.identity) for member in members)
        if len(members) == 1 or end - start >= MIN_SHARED_TOKENS:
            if end > start:
                parent, added = self.add(first, start, end, parent)
                path = np.concatenate([path, added])
            start = end
        branches: dict[int | None, list[_Sequence]] = {}
        for member in members:
            is_finished = len(member.inputs) == end
            branch_id = None if is_finished else int(member.identity[end])
            branches.setdefault(branch_id, []).append(member)
        for branch_id, branch in branches.items():
            if branch_id is not None:
                self.grow(branch, start, parent, path, rows)
                continue
            tail = path
            if end > start:
                tail = np.concatenate([path, self.add(first, start, end, parent)[1]])
            for member in branch:
                rows[member.index] = tail
