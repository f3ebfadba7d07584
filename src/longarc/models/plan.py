"""Which queries attend to which keys in one pass: the same few words for training and inference.

In training the keys are the packed tokens themselves, in inference the rows of the cache; both are a
table of rows, and a sequence is a list of row numbers by position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from longarc.algos.selection import NO_KEY
from longarc.models.cache import PagedCache
from longarc.models.kernels.attention import FlatRuns
from longarc.models.kernels.key_lists import KeyLists
from longarc.models.layout import Layout


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive tokens of one sequence, each seeing its sequence up to itself."""

    first_query: int
    """Packed index of the first token."""
    num_queries: int
    first_position: int
    """Position of the first token in its sequence."""
    key_rows: slice | Int[Tensor, " keys"]
    """Row in the table of every position up to the last token."""

    @property
    def num_keys(self) -> int:
        """Positions that the last token sees."""
        return self.first_position + self.num_queries

    @property
    def queries(self) -> slice:
        """The tokens on the packed axis."""
        return slice(self.first_query, self.first_query + self.num_queries)

    def key_row_list(self) -> Tensor:
        """Return the row of every position as a tensor."""
        if isinstance(self.key_rows, slice):
            return torch.arange(self.key_rows.start, self.key_rows.stop)
        return self.key_rows

    def blocks(self, size: int) -> Iterator["QueryRun"]:
        """Cut the run into pieces of at most ``size`` queries."""
        for start in range(0, self.num_queries, size):
            count = min(size, self.num_queries - start)
            position = self.first_position + start
            if isinstance(self.key_rows, slice):
                first_row = self.key_rows.start
                rows: slice | Tensor = slice(first_row, first_row + position + count)
            else:
                rows = self.key_rows[: position + count]
            yield QueryRun(self.first_query + start, count, position, rows)

    def rows_at(self, positions: Int[Tensor, "Q S"]) -> Int[Tensor, "Q S"]:
        """Translate positions in the sequence to rows of the table; NO_KEY stays."""
        if isinstance(self.key_rows, slice):
            if self.key_rows.start == 0:
                return positions
            return torch.where(positions == NO_KEY, NO_KEY, positions + self.key_rows.start)
        rows = self.key_rows[positions.clamp_min(0)]
        return rows.masked_fill_(positions == NO_KEY, NO_KEY)


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """One new token for each of many cached sequences: the shape of a decode step."""

    queries: slice | Int[Tensor, " batch"]
    """Packed index of each token."""
    num_keys: Int[Tensor, " batch"]
    """Positions that each token sees, itself included."""
    max_keys: int
    key_rows: Int[Tensor, "batch max_keys"]
    """Row of every position of each sequence; behind its last one, any row of the table."""
    slots: tuple[int, ...]
    """Slots of the cache."""

    def query_list(self) -> list[int]:
        """Return the packed index of each token as numbers."""
        if isinstance(self.queries, slice):
            return list(range(self.queries.start, self.queries.stop))
        return self.queries.tolist()

    def key_window(self, table: Tensor) -> Tensor:
        """Return the first ``max_keys`` rows of each sequence, [batch, max_keys, width]."""
        return table[self.key_rows]

    def hidden_keys(self) -> Tensor:
        """Return [batch, max_keys], True where a key lies behind the token's own position."""
        position = torch.arange(self.max_keys, device=self.num_keys.device)
        return position >= self.num_keys[:, None]

    def rows_at(self, positions: Int[Tensor, "batch S"]) -> Int[Tensor, "batch S"]:
        """Translate positions in each sequence to rows of the table; NO_KEY stays."""
        rows = self.key_rows.gather(1, positions.clamp_min(0))
        return rows.masked_fill_(positions == NO_KEY, NO_KEY)

    def positions_of(self, rows: Int[Tensor, "batch S"]) -> Int[Tensor, "batch S"]:
        """Translate rows of the table that each token sees to positions in its sequence; NO_KEY stays."""
        # What lies behind a sequence's last position may be a row of it as well.
        largest = torch.iinfo(self.key_rows.dtype).max
        seen = self.key_rows.masked_fill(self.hidden_keys(), largest)
        ordered, position = seen.sort(dim=1)
        found = torch.searchsorted(ordered, rows.clamp_min(0)).clamp_max(position.shape[1] - 1)
        return position.gather(1, found).masked_fill_(rows == NO_KEY, NO_KEY)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All queries of one pass."""

    runs: tuple[QueryRun, ...]
    singles: SingleQueries | None = None
    slots: tuple[int, ...] = ()
    """Slot of the cache of each run; empty without a cache."""

    @classmethod
    def of_layout(cls, layout: Layout, device: torch.device) -> "AttentionPlan":
        """Plan a pass over packed tokens that attend to one another."""
        offsets, positions = layout.offsets(), layout.start_positions()
        runs = []
        for index, span in enumerate(layout.spans):
            pieces = [(offsets[a], layout.spans[a].length) for a in layout.ancestors(index)]
            pieces.append((offsets[index], span.length))
            runs.append(
                QueryRun(offsets[index], span.length, positions[index], _key_rows(pieces, device))
            )
        return cls(tuple(runs))

    def flat_runs(self) -> FlatRuns:
        """Return the runs as the native kernels read them; a single query is a run of one."""
        runs = [
            (run.first_query, run.num_queries, run.first_position, run.key_row_list())
            for run in self.runs
        ]
        if self.singles is not None:
            runs += [
                (query, 1, count - 1, rows[:count])
                for query, count, rows in zip(
                    self.singles.query_list(),
                    self.singles.num_keys.tolist(),
                    self.singles.key_rows,
                    strict=True,
                )
            ]
        return FlatRuns.of(runs)

    def key_lists(self, num_rows: int, device: torch.device) -> KeyLists:
        """Return what each query sees as the Triton kernels read it.

        Args:
            num_rows: rows of the table.
            device: where the lists go.
        """
        lists, num_listed = [torch.arange(num_rows, device=device)], num_rows
        first_keys = torch.empty(self.num_queries, dtype=torch.long, device=device)
        num_keys = torch.empty_like(first_keys)
        for run in self.runs:
            if isinstance(run.key_rows, slice):
                first_keys[run.queries] = run.key_rows.start
            else:
                first_keys[run.queries] = num_listed
                lists.append(run.key_rows)
                num_listed += len(run.key_rows)
            num_keys[run.queries] = torch.arange(
                run.first_position + 1, run.num_keys + 1, device=device
            )
        longest = [run.num_keys for run in self.runs]
        if self.singles is not None:
            count, size = self.singles.key_rows.shape
            first_keys[self.singles.queries] = (
                num_listed + torch.arange(count, device=device) * size
            )
            lists.append(self.singles.key_rows.flatten())
            num_keys[self.singles.queries] = self.singles.num_keys
            longest.append(self.singles.max_keys)
        return KeyLists(torch.cat(lists), first_keys, num_keys, max(longest))

    def visible_rows(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield every query, by its packed index, and the rows that it sees by position."""
        for run in self.runs:
            rows = run.key_row_list().to(device)
            for index in range(run.num_queries):
                yield run.first_query + index, rows[: run.first_position + index + 1]
        if self.singles is not None:
            queries = torch.arange(self.num_queries)[self.singles.queries]
            for index, query in enumerate(queries.tolist()):
                yield query, self.singles.key_rows[index, : self.singles.num_keys[index]]

    def rows_at(self, positions_NS: Int[Tensor, "N S"]) -> Int[Tensor, "N S"]:
        """Translate positions in each query's sequence to rows of the table; NO_KEY stays."""
        rows_NS = torch.empty_like(positions_NS)
        for run in self.runs:
            rows_NS[run.queries] = run.rows_at(positions_NS[run.queries])
        if self.singles is not None:
            rows_NS[self.singles.queries] = self.singles.rows_at(positions_NS[self.singles.queries])
        return rows_NS

    def positions_of(self, rows_NS: Int[Tensor, "N S"]) -> Int[Tensor, "N S"]:
        """Translate rows that queries see to positions in their sequences; NO_KEY stays."""
        positions_NS = torch.full_like(rows_NS, NO_KEY)
        for run in self.runs:
            seen = run.key_row_list().to(rows_NS.device)
            # One place more, which NO_KEY, the last one, reads.
            position_R = torch.full((int(seen.max()) + 2,), NO_KEY, device=rows_NS.device)
            position_R[seen] = torch.arange(len(seen), device=rows_NS.device)
            positions_NS[run.queries] = position_R[rows_NS[run.queries]]
        if self.singles is not None:
            positions_NS[self.singles.queries] = self.singles.positions_of(
                rows_NS[self.singles.queries]
            )
        return positions_NS

    def own_rows(self, device: torch.device) -> Int[Tensor, " tokens"]:
        """Return the row of each query's own position."""
        rows = torch.empty(self.num_queries, dtype=torch.long, device=device)
        for run in self.runs:
            rows[run.queries] = run.key_row_list()[run.first_position :].to(device)
        if self.singles is not None:
            last = self.singles.num_keys[:, None] - 1
            rows[self.singles.queries] = self.singles.key_rows.gather(1, last)[:, 0]
        return rows

    @property
    def num_queries(self) -> int:
        """Tokens of the pass."""
        singles = 0 if self.singles is None else len(self.singles.num_keys)
        return sum(run.num_queries for run in self.runs) + singles

    @classmethod
    def of_cache(
        cls,
        cache: PagedCache,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        device: torch.device,
    ) -> "AttentionPlan":
        """Plan a pass of new tokens over cached sequences."""
        runs: list[QueryRun] = []
        run_slots: list[int] = []
        single: list[tuple[int, int, int]] = []
        first_query = 0
        for slot, start, count in zip(slots, starts, counts, strict=True):
            if count == 1:
                single.append((first_query, slot, start + 1))
            else:
                rows = cache.rows_of(slot, start + count)
                rows = rows if isinstance(rows, slice) else rows.to(device)
                runs.append(QueryRun(first_query, count, start, rows))
                run_slots.append(slot)
            first_query += count
        singles = _singles(cache, single, device=device) if single else None
        return cls(tuple(runs), singles, tuple(run_slots))


def _key_rows(pieces: Sequence[tuple[int, int]], device: torch.device) -> slice | Tensor:
    """Return the rows of consecutive (offset, length) pieces, as a slice where they touch."""
    first = pieces[0][0]
    expected = first
    for offset, length in pieces:
        if offset != expected:
            return torch.cat([torch.arange(o, o + n, device=device) for o, n in pieces])
        expected = offset + length
    return slice(first, expected)


def _singles(
    cache: PagedCache, single: Sequence[tuple[int, int, int]], *, device: torch.device
) -> SingleQueries:
    queries, slots, num_keys = (list(column) for column in zip(*single, strict=True))
    return SingleQueries(
        queries=_as_slice(queries) or torch.tensor(queries, device=device),
        num_keys=torch.tensor(num_keys, device=device),
        max_keys=max(num_keys),
        key_rows=cache.rows_of_all(slots, max(num_keys)).to(device),
        slots=tuple(slots),
    )


def _as_slice(numbers: Sequence[int]) -> slice | None:
    first = numbers[0]
    if all(number == first + i for i, number in enumerate(numbers)):
        return slice(first, first + len(numbers))
    return None
