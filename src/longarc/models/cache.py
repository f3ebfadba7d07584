"""What inference keeps of the tokens it has seen: contiguous rows per slot, one slot per sequence."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from longarc.errors import ContractError


class SlotCache:
    """Rows of every kind (latents, indexer keys, keys, values) for every layer and slot.

    A row is never moved: position p of the sequence in slot s is row ``s * max_length + p`` of the
    flattened table of a layer.
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        *,
        num_layers: int,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Allocate all rows.

        Args:
            widths: kinds of rows and their widths.
            num_layers: of the model.
            num_slots: sequences.
            max_length: of a sequence [tokens].
            dtype: of the rows.
            device: where they are.
            layers: which layers have rows of a kind; a kind that is not named is in all.
        """
        self.num_slots = num_slots
        self.max_length = max_length
        self._place = places(widths, layers, num_layers=num_layers)
        # Zeros, not uninitialised memory: rows behind a sequence's end are read and masked.
        self._rows = {
            name: torch.zeros(
                len(self._place[name]), num_slots * max_length, width, dtype=dtype, device=device
            )
            for name, width in widths.items()
        }

    def table(self, name: str, layer: int) -> Float[Tensor, "rows width"]:
        """Return all rows of one kind in one layer, slot after slot."""
        return self._rows[name][self._place[name][layer]]

    @property
    def num_bytes(self) -> int:
        """Memory of all rows [bytes]."""
        return sum(rows.nbytes for rows in self._rows.values())

    def reusable(self, slot: int, length: int) -> int:
        """Return how much of a slot's first ``length`` positions another sequence can continue: all of it."""
        return length

    def copy_prefix(self, source_slot: int, target_slot: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another, in all layers.

        Raises:
            ContractError: a slot or the length does not exist.
        """
        for slot in (source_slot, target_slot):
            self._check_range(slot, 0, length)
        source, target = source_slot * self.max_length, target_slot * self.max_length
        for rows in self._rows.values():
            rows[:, target : target + length] = rows[:, source : source + length]

    def check(self, slots: list[int], starts: list[int], counts: list[int]) -> None:
        """Refuse new tokens that do not fit.

        Raises:
            ContractError: an unknown or repeated slot, or positions beyond ``max_length``.
        """
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

    def _check_range(self, slot: int, start: int, stop: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ContractError(
                f"slot {slot} does not exist: the cache has slots 0..{self.num_slots - 1}"
            )
        if not 0 <= start <= stop <= self.max_length:
            raise ContractError(
                f"positions {start}..{stop} of slot {slot} do not fit: the cache holds {self.max_length} "
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
