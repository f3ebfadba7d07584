"""The slot cache of the native decoder: keys in blocks whose lanes are positions.

A table is [layer, slot, head, step, ...]; a step holds one position of a plain table and one block of
positions of a blocked one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longarc.models.cache import SlotCache, places
from longarc.models.kernels.memory import Arena

_MAX_HUGE_BYTES = 256 << 20
"""A larger cache, many slots of the longest context, is hardly ever full, and a huge page is all there or not."""


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of rows."""

    num_heads: int
    width: int
    is_blocked: bool
    layers: tuple[int, ...] | None = None
    """Layers that have such rows; None = all."""


class BlockedSlotCache(SlotCache):
    """Rows for every layer and slot, laid out for the native kernels."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        num_layers: int,
        num_slots: int,
        max_length: int,
        lanes: int,
    ) -> None:
        super().__init__(
            {},
            num_layers=num_layers,
            num_slots=num_slots,
            max_length=max_length,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self._lanes = lanes
        self.padded_length = -(-max_length // lanes) * lanes
        self._tables = dict(tables)
        named = {name: table.layers for name, table in tables.items() if table.layers is not None}
        self._place = places(tables, named, num_layers=num_layers)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, table in tables.items():
            steps = [self.padded_length // lanes, table.width, lanes]
            inner = steps if table.is_blocked else [self.padded_length, table.width]
            shapes[name] = (len(self._place[name]), num_slots, table.num_heads, *inner)
        self._storage = _zeros(shapes)

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
        return sum(rows.nbytes for rows in self._storage.values())

    def copy_prefix(self, source_slot: int, target_slot: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another, in all layers.

        A block is copied whole: what follows the prefix in it is overwritten before it is ever seen.

        Raises:
            ContractError: a slot or the length does not exist.
        """
        for slot in (source_slot, target_slot):
            self._check_range(slot, 0, length)
        for name, rows in self._storage.items():
            steps = -(-length // self._lanes) if self._tables[name].is_blocked else length
            rows[:, target_slot, :, :steps] = rows[:, source_slot, :, :steps]


def _zeros(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Allocate the tables, in huge pages unless that would fill memory which is never used."""
    if 4 * sum(torch.Size(shape).numel() for shape in shapes.values()) > _MAX_HUGE_BYTES:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}
    arena = Arena()
    # Written now: the system clears a page when it is first touched, and no request should wait for that.
    return {name: arena.take(*shape).zero_() for name, shape in shapes.items()}
