"""The slot cache of the native decoder: keys in blocks whose lanes are positions.

A table is [layer, slot, head, step, ...]; a step holds one position of a plain table and one block of
positions of a blocked one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longarc.models.cache import SlotCache
from longarc.models.kernels.memory import Arena


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of rows."""

    num_heads: int
    width: int
    is_blocked: bool


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
        self._storage: dict[str, Tensor] = {}
        arena = Arena()
        for name, table in tables.items():
            steps = [self.padded_length // lanes, table.width, lanes]
            inner = steps if table.is_blocked else [self.padded_length, table.width]
            self._storage[name] = arena.take(num_layers, num_slots, table.num_heads, *inner)

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return the tables of one layer by name."""
        return {name: rows[index] for name, rows in self._storage.items()}

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
