"""Which sequence's cache lies where, and which of it a new prompt can reuse.

A slot is one row range of the model's cache. It remembers the tokens whose state it holds, so that the
next turn of a session, or another member of a group with the same prompt, starts from it. What old
weights computed never serves a new request: an update drops idle slots and marks running ones stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(slots=True)
class Slot:
    """One cache slot."""

    index: int
    capacity: int
    tokens: Ids = field(init=False)
    """Tokens whose state the cache holds are ``tokens[:length]``."""
    length: int = 0
    is_busy: bool = False
    is_stale: bool = False
    """Part of the state was computed by weights that are no longer the newest."""
    session_id: str = ""
    last_used: int = 0

    def __post_init__(self) -> None:
        self.tokens = np.zeros(self.capacity, dtype=np.int64)

    def append(self, token_ids: Sequence[int] | Ids) -> None:
        """Record tokens whose state was just written."""
        self.tokens[self.length : self.length + len(token_ids)] = token_ids
        self.length += len(token_ids)


class SlotTable:
    """All slots of one engine."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.slots = [Slot(index=i, capacity=capacity) for i in range(num_slots)]
        self._last_of: dict[str, Slot] = {}
        """The slot that each session used last; at most one entry a slot."""
        self._clock = 0

    def donor(self, prompt: Ids, session_id: str) -> tuple[Slot | None, int]:
        """Return the slot that shares the longest prefix with ``prompt``, and its length [tokens].

        The session's own idle slot wins a tie, because nothing has to be copied from it. No other slot is
        looked at where all that it holds is in the prompt (the next turn of a conversation), or all that
        the prompt can use is in it. The last prompt token is never counted: its state has to be computed
        for the next logits.
        """
        best: Slot | None = None
        best_length = 0
        limit = len(prompt) - 1
        own = self._last_of.get(session_id)
        if own is not None and own.session_id == session_id and not own.is_busy and own.length:
            best, best_length = own, common_prefix(own.tokens[: own.length], prompt[:limit])
            if best_length in (own.length, limit):
                return best, best_length
        for slot in self.slots:
            if slot.is_stale or slot.length <= best_length or best_length == limit:
                continue
            # A longer prefix has this token; one look spares most comparisons.
            if slot.tokens[best_length] != prompt[best_length]:
                continue
            length = common_prefix(slot.tokens[: slot.length], prompt[:limit])
            if length > best_length:
                best, best_length = slot, length
        return best, best_length

    def acquire(self, session_id: str, donor: Slot | None) -> Slot | None:
        """Take an idle slot: the donor itself if idle and of this session, else the least recently used."""
        self._clock += 1
        idle = [slot for slot in self.slots if not slot.is_busy]
        if not idle:
            return None
        if donor is not None and not donor.is_busy and donor.session_id == session_id:
            chosen = donor
        else:
            others = [slot for slot in idle if slot is not donor] or idle
            chosen = min(others, key=lambda s: (s.length > 0 and not s.is_stale, s.last_used))
        chosen.is_busy = True
        if self._last_of.get(chosen.session_id) is chosen:
            del self._last_of[chosen.session_id]
        chosen.session_id = session_id
        self._last_of[session_id] = chosen
        chosen.last_used = self._clock
        return chosen

    def release(self, slot: Slot) -> None:
        """Give a slot back; its state stays for reuse unless it is stale."""
        self._clock += 1
        slot.is_busy = False
        slot.last_used = self._clock
        if slot.is_stale:
            slot.length = 0
            slot.is_stale = False

    def invalidate(self) -> None:
        """New weights: nothing computed so far may serve a new request."""
        for slot in self.slots:
            if slot.is_busy:
                slot.is_stale = True
            else:
                slot.length = 0


def common_prefix(left: Ids, right: Ids) -> int:
    """Return how many leading tokens two sequences share."""
    limit = min(len(left), len(right))
    different = left[:limit] != right[:limit]
    first = int(different.argmax()) if limit else 0
    return first if limit and different[first] else limit
