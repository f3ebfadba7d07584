"""What inference keeps of the tokens it has seen: rows in pages, and for each sequence a list of pages.

::

    slot 0  pages 7, 2, 9        position p of a slot is row  page[p // page_tokens] * page_tokens + p % page_tokens
    slot 1  pages 7, 4           of every table: two sequences that begin alike can share a page

A page holds the rows of every kind and layer of as many consecutive positions. A row is never moved. Who gives pages
to slots decides what is shared and what is kept; without such a caller each slot has pages of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.algos.fp8 import fp8_rounded_rows
from longarc.errors import ContractError
from longarc.models.room import room_for_rows
from longarc.models.routed_rows import RoutedRows, RoutedTokens, RoutingShape

PAGE_TOKENS = 64
"""Positions of a page where nobody asks for another number."""
NO_PAGE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """How many sequences and tokens a cache has room for."""

    num_slots: int
    """Sequences that can be extended."""
    max_length: int
    """Of a sequence [tokens]."""
    page_tokens: int = PAGE_TOKENS
    """Positions of a page; a power of two, at least 16."""
    num_pages: int | None = None
    """Pages of all sequences together, which the caller gives to slots; None gives each slot its own, for all of
    its length, once and for all."""

    def __post_init__(self) -> None:
        if self.page_tokens < 16 or self.page_tokens & (self.page_tokens - 1):
            raise ContractError(
                f"page_tokens={self.page_tokens} has to be a power of two and at least 16"
            )

    @property
    def slot_pages(self) -> int:
        """Pages of a sequence of the greatest length."""
        return -(-self.max_length // self.page_tokens)

    @property
    def total_pages(self) -> int:
        """Pages of the cache."""
        return self.num_slots * self.slot_pages if self.num_pages is None else self.num_pages


@dataclass(frozen=True, slots=True)
class RowRounding:
    """How the rows of a kind are rounded to FP8."""

    width: int
    """Numbers of a row that are, from the first on; the others stay."""
    block_size: int
    """Neighbouring numbers that share a scale."""

    def rounded(self, rows: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """Return what is left of rows."""
        kept = fp8_rounded_rows(rows[:, : self.width], block_size=self.block_size)
        return torch.cat((kept, rows[:, self.width :]), dim=-1)


class PagedCache:
    """Rows of every kind (latents, indexer keys, keys, values) for every layer and page."""

    def __init__(
        self,
        widths: Mapping[str, int],
        shape: CacheShape,
        *,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Allocate all rows.

        Args:
            widths: kinds of rows and their widths.
            shape: sequences, pages and lengths.
            num_layers: of the model.
            dtype: of the rows.
            device: where they are.
            layers: which layers have rows of a kind; a kind that is not named is in all.
        """
        self.shape = shape
        self.rounding: Mapping[str, RowRounding] = {}
        """What FP8 leaves of a row when it is written, by kind; a kind that is not named stays whole."""
        self._place = places(widths, layers, num_layers=num_layers)
        num_rows = shape.total_pages * shape.page_tokens
        # Zeros, not uninitialised memory: rows behind a sequence's end are read and masked.
        self._rows = {
            name: torch.zeros(len(self._place[name]), num_rows, width, dtype=dtype, device=device)
            for name, width in widths.items()
        }
        self.page_table = torch.full((shape.num_slots, shape.slot_pages), NO_PAGE)
        """Pages of each slot by position, NO_PAGE behind the last one; on the CPU."""
        if shape.num_pages is None:
            self.page_table[:] = torch.arange(shape.total_pages).view(self.page_table.shape)
        self._pages = self.page_table.numpy()
        self._routed: RoutedRows | None = None

    def table(self, name: str, layer: int) -> Float[Tensor, "rows width"]:
        """Return all rows of one kind in one layer, page after page."""
        return self._rows[name][self._place[name][layer]]

    @property
    def num_rows(self) -> int:
        """Rows of a table."""
        return self.shape.total_pages * self.shape.page_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of all rows [bytes]."""
        return sum(rows.nbytes for rows in self._rows.values()) + self._routing_bytes

    @property
    def _routing_bytes(self) -> int:
        return 0 if self._routed is None else self._routed.num_bytes

    @property
    def routed(self) -> RoutedRows | None:
        """What the tokens of the rows were routed to; None where nobody asked."""
        return self._routed

    def keep_routing(self, shape: RoutingShape) -> None:
        """From now on keep what each new token is routed to, beside its rows.

        Called once, while there is nothing in the cache.

        Raises:
            ResourceError: there is no memory for it.
        """
        with room_for_rows(self.num_rows):
            self._routed = RoutedRows(shape, self.num_rows)

    def routing_of(self, slot: int, start: int, stop: int) -> RoutedTokens:
        """Return what positions ``start`` to ``stop`` of a slot were routed to.

        Raises:
            ContractError: it is not kept.
        """
        if self._routed is None:
            raise ContractError(
                "the cache does not keep what tokens are routed to; call keep_routing before its first token"
            )
        size = self.shape.page_tokens
        positions = np.arange(start, stop)
        rows = self._pages[slot][positions // size] * size + positions % size
        return self._routed.take(rows, start)

    @property
    def can_branch(self) -> bool:
        """Whether a sequence can go on from any position of another one, or only where that one stands."""
        return True

    def under(self, weights: Mapping[str, Tensor]) -> "PagedCache":
        """Return these very rows and pages for a model with other weights.

        Args:
            weights: parameters and buffers of that model by name, which stay its own; where nothing is made of them,
                the cache itself is returned.
        """
        return self

    def prepare(self) -> None:
        """Make what the next pass needs of weights that have changed, so that it does not have to."""

    def give_pages(self, slot: int, pages: Sequence[int], *, first: int = 0) -> None:
        """Let a slot's positions from the ``first``-th page on lie in these pages, and none behind them.

        Raises:
            ContractError: a page or the slot does not exist, or there are more pages than the length allows.
        """
        self._check_range(slot, 0, 0)
        stop = first + len(pages)
        if stop > self.shape.slot_pages or not all(
            0 <= page < self.shape.total_pages for page in pages
        ):
            raise ContractError(
                f"slot {slot} cannot have pages {list(pages)} from place {first} on: a slot has at most "
                f"{self.shape.slot_pages} of the pages 0..{self.shape.total_pages - 1}"
            )
        self._pages[slot, first:stop] = pages
        self._pages[slot, stop:] = NO_PAGE

    def rows_of(self, slot: int, length: int) -> slice | Int[Tensor, " length"]:
        """Return the row of each of a slot's first ``length`` positions, as a slice where they follow each other."""
        size = self.shape.page_tokens
        pages = self.page_table[slot, : -(-length // size)]
        first = int(pages[0]) * size
        if torch.equal(pages, torch.arange(int(pages[0]), int(pages[0]) + len(pages))):
            return slice(first, first + length)
        return (pages[:, None] * size + torch.arange(size)).flatten()[:length]

    def rows_of_all(self, slots: Sequence[int], length: int) -> Int[Tensor, "slots length"]:
        """Return the rows of several slots' first positions; where a slot has no page, rows of some other one."""
        size = self.shape.page_tokens
        pages = self.page_table[list(slots), : -(-length // size)].clamp_min(0)
        return (pages[:, :, None] * size + torch.arange(size)).flatten(1)[:, :length]

    def copy_rows(self, source_page: int, target_page: int, count: int) -> None:
        """Copy the first ``count`` positions of one page to another, in all layers."""
        size = self.shape.page_tokens
        source, target = source_page * size, target_page * size
        for rows in self._rows.values():
            rows[:, target : target + count] = rows[:, source : source + count]
        self._copy_routing(source_page, target_page, count)

    def _copy_routing(self, source_page: int, target_page: int, count: int) -> None:
        if self._routed is not None:
            size = self.shape.page_tokens
            self._routed.copy(source_page * size, target_page * size, count)

    def copy_prefix(self, source_slot: int, target_slot: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to the pages of another, in all layers.

        Raises:
            ContractError: a slot or the length does not exist, or the target has no pages for it.
        """
        self._check_fit([source_slot, target_slot], [0, 0], [length, length])
        size = self.shape.page_tokens
        for index, start in enumerate(range(0, length, size)):
            source, target = (int(self._pages[slot, index]) for slot in (source_slot, target_slot))
            self.copy_rows(source, target, min(size, length - start))

    def check(self, slots: list[int], starts: list[int], counts: list[int]) -> None:
        """Refuse new tokens that do not fit.

        Raises:
            ContractError: an unknown or repeated slot, positions beyond the greatest length, or positions for
                which the slot has no page.
        """
        self._check_fit(slots, starts, counts)

    def _check_fit(self, slots: list[int], starts: list[int], counts: list[int]) -> None:
        if len(set(slots)) != len(slots):
            raise ContractError(
                f"slots {slots} repeat: a slot holds one sequence, extend it once per call"
            )
        for slot, start, count in zip(slots, starts, counts, strict=True):
            if count < 1:
                raise ContractError(
                    f"slot {slot} gets {count} new tokens; leave it out or give at least 1"
                )
            self._check_range(slot, start, start + count)
            last_page = (start + count - 1) // self.shape.page_tokens
            if self._pages[slot, last_page] == NO_PAGE:
                raise ContractError(
                    f"slot {slot} has no page for position {start + count - 1}; give it one first"
                )

    def _check_range(self, slot: int, start: int, stop: int) -> None:
        if not 0 <= slot < self.shape.num_slots:
            raise ContractError(
                f"slot {slot} does not exist: the cache has slots 0..{self.shape.num_slots - 1}"
            )
        if not 0 <= start <= stop <= self.shape.max_length:
            raise ContractError(
                f"positions {start}..{stop} of slot {slot} do not fit: the cache holds {self.shape.max_length} "
                f"tokens per slot. Make it longer, or end the sequence earlier"
            )


def places(
    kinds: Iterable[str], layers: Mapping[str, Sequence[int]], *, num_layers: int
) -> dict[str, dict[int, int]]:
    """Return for each kind of rows where among the layers that have it a layer stands."""
    return {
        kind: {layer: place for place, layer in enumerate(layers.get(kind, range(num_layers)))}
        for kind in kinds
    }
