"""What inference keeps of a hybrid: rows of the layers that attend, and one memory a slot of the others.

A row of a position stays what it was; a memory is what all tokens so far made of it. So a sequence can
go on only where its memory stands, which is why this cache says what of a prefix another may reuse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longarc.errors import ContractError
from longarc.models.cache import CacheShape, PagedCache
from longarc.models.plan import AttentionPlan

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """What one layer remembers of one sequence."""

    num_heads: int
    key_width: int
    value_width: int
    num_channels: int = 0
    """Channels of the convolution in front; 0 where there is none."""
    num_before: int = 0
    """Tokens before a token that the convolution reads."""

    @property
    def num_values(self) -> int:
        """Numbers that the layer keeps for a sequence, however long it is."""
        memory = self.num_heads * self.key_width * self.value_width
        return memory + self.num_channels * self.num_before


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """New tokens of one slot."""

    first_query: int
    num_queries: int
    slot: int


class HybridCache(PagedCache):
    """Rows for the layers that attend, memories for those that do not."""

    def __init__(
        self,
        widths: Mapping[str, int],
        memories: Mapping[int, MemoryShape],
        shape: CacheShape,
        *,
        num_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        attending = [layer for layer in range(num_layers) if layer not in memories]
        super().__init__(widths, shape, num_layers=len(attending), dtype=dtype, device=device)
        self._row_layer = {layer: index for index, layer in enumerate(attending)}
        num_slots = shape.num_slots
        self._lengths = [0] * num_slots
        # A memory adds up over the whole sequence: fp32 or better.
        dtype = torch.promote_types(dtype, torch.float32)
        self._memories = {
            layer: torch.zeros(
                *(num_slots, memory.num_heads, memory.key_width, memory.value_width),
                dtype=dtype,
                device=device,
            )
            for layer, memory in memories.items()
        }
        self._before = {
            layer: torch.zeros(
                *(num_slots, memory.num_before, memory.num_channels), dtype=dtype, device=device
            )
            for layer, memory in memories.items()
        }

    def table(self, name: str, layer: int) -> Float[Tensor, "rows width"]:
        """Return all rows of one kind in one layer that attends."""
        return super().table(name, self._row_layer[layer])

    def memory(self, layer: int) -> Float[Tensor, "slots n k v"]:
        """Return the memories of all slots in one layer that does not attend; written in place."""
        return self._memories[layer]

    def before(self, layer: int) -> Float[Tensor, "slots before channels"]:
        """Return what the convolution of one layer still reads, the oldest token first; written in place."""
        return self._before[layer]

    @property
    def can_branch(self) -> bool:
        """Whether a sequence can go on from any position of another one, or only where that one stands."""
        return not self._memories

    def reusable(self, slot: int, length: int) -> int:
        """Return how much of a slot's first ``length`` positions can be continued: all of it, or nothing."""
        return length if self.can_branch or self._lengths[slot] == length else 0

    def copy_prefix(self, source_slot: int, target_slot: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another.

        Raises:
            ContractError: a slot does not exist, or the memories of the source stand elsewhere.
        """
        super().copy_prefix(source_slot, target_slot, length)
        if self.reusable(source_slot, length) != length:
            raise ContractError(
                f"the memories of slot {source_slot} stand at position {self._lengths[source_slot]}, not at "
                f"{length}; they cannot go back. Copy as much as reusable() says"
            )
        for kept in (*self._memories.values(), *self._before.values()):
            kept[target_slot] = kept[source_slot]
        self._lengths[target_slot] = length

    def check(self, slots: list[int], starts: list[int], counts: list[int]) -> None:
        """Refuse new tokens that do not fit, and clear the memories of sequences that begin.

        Raises:
            ContractError: as in the base class, or new tokens do not start where the memories stand.
        """
        super().check(slots, starts, counts)
        for slot, start in zip(slots, starts, strict=True):
            if start and self.reusable(slot, start) != start:
                raise ContractError(
                    f"slot {slot} stands at position {self._lengths[slot]}, but its new tokens start at "
                    f"{start}; continue there, or start at 0"
                )
        for slot, start in zip(slots, starts, strict=True):
            # A pass that fails leaves memories of which nobody knows where they stand.
            self._lengths[slot] = _NOWHERE
            if start == 0:
                for kept in (*self._memories.values(), *self._before.values()):
                    kept[slot] = 0.0

    def stand_at(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Note up to where the memories of these slots hold their sequences."""
        for slot, length in zip(slots, lengths, strict=True):
            self._lengths[slot] = length

    def sequences(self, plan: AttentionPlan) -> list[CachedSequence]:
        """Return the new tokens of a pass by slot."""
        found = [
            CachedSequence(run.first_query, run.num_queries, slot)
            for run, slot in zip(plan.runs, plan.slots, strict=True)
        ]
        if plan.singles is not None:
            singles = zip(plan.singles.query_list(), plan.singles.slots, strict=True)
            found.extend(CachedSequence(query, 1, slot) for query, slot in singles)
        return found
