"""The paged cache of the native decoder: keys in blocks whose lanes are positions.

A table is [layer, page, head, step, ...]; a step holds one position of a plain table and one block of
positions of a blocked one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longarc.models.cache import CacheShape, PagedCache, places
from longarc.models.kernels.memory import Arena

_MAX_TOUCHED_BYTES = 256 << 20
"""A larger cache gets its memory from the system as it is written to."""


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of rows."""

    num_heads: int
    width: int
    is_blocked: bool
    layers: tuple[int, ...] | None = None
    """Layers that have such rows; None = all."""


class BlockedPagedCache(PagedCache):
    """Rows for every layer and page, laid out for the native kernels."""

    def __init__(
        self, tables: Mapping[str, Table], shape: CacheShape, *, num_layers: int, lanes: int
    ) -> None:
        super().__init__(
            {}, shape, num_layers=num_layers, dtype=torch.float32, device=torch.device("cpu")
        )
        self._lanes = lanes
        self._tables = dict(tables)
        named = {name: table.layers for name, table in tables.items() if table.layers is not None}
        self._place = places(tables, named, num_layers=num_layers)
        sizes: dict[str, tuple[int, ...]] = {}
        for name, table in tables.items():
            steps = [shape.page_tokens // lanes, table.width, lanes]
            inner = steps if table.is_blocked else [shape.page_tokens, table.width]
            sizes[name] = (len(self._place[name]), shape.total_pages, table.num_heads, *inner)
        self._storage = _zeros(sizes)

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return the tables of one layer by name; what it has no rows of is not there."""
        return {
            name: rows[self._place[name][index]]
            for name, rows in self._storage.items()
            if index in self._place[name]
        }

    @property
    def num_bytes(self) -> int:
        """Memory of all rows [bytes]."""
        return sum(rows.nbytes for rows in self._storage.values()) + self._routing_bytes

    def copy_rows(self, source_page: int, target_page: int, count: int) -> None:
        """Copy the first ``count`` positions of one page to another, in all layers.

        A block is copied whole: what follows in it is overwritten before it is ever seen.
        """
        for name, rows in self._storage.items():
            steps = -(-count // self._lanes) if self._tables[name].is_blocked else count
            rows[:, target_page, :, :steps] = rows[:, source_page, :, :steps]
        self._copy_routing(source_page, target_page, count)


def _zeros(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Allocate the tables in huge pages of the system."""
    arena = Arena()
    tables = {name: arena.take(*shape) for name, shape in shapes.items()}
    if sum(table.nbytes for table in tables.values()) <= _MAX_TOUCHED_BYTES:
        # Written now: the system clears a page when it is first touched, and no request should wait for that.
        for table in tables.values():
            table.zero_()
    return tables
