"""Which sequence's cache lies where, and which of it a new prompt can reuse.

A slot is one row range of the model's cache. It remembers the tokens whose state it holds, so that the
next turn of a session, or another member of a group with the same prompt, starts from it. What old
weights computed never serves a new request: an update drops idle slots and marks running ones stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]

_BLOCK_TOKENS = 128
"""Tokens of a prompt that are compared with several slots at a time."""


@dataclass(slots=True)
class Slot:
    """One cache slot."""

    index: int
    tokens: Ids
    """Tokens whose state the cache holds are ``tokens[:length]``."""
    length: int = 0
    is_busy: bool = False
    is_stale: bool = False
    """Part of the state was computed by weights that are no longer the newest."""
    session_id: str = ""

    def append(self, token_ids: Sequence[int] | Ids) -> None:
        """Record tokens whose state was just written."""
        self.tokens[self.length : self.length + len(token_ids)] = token_ids
        self.length += len(token_ids)


class SlotTable:
    """All slots of one engine."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self._tokens = np.zeros((num_slots, capacity), dtype=np.int64)
        self.slots = [Slot(index=i, tokens=row) for i, row in enumerate(self._tokens)]
        self._last_of: dict[str, Slot] = {}
        """The slot that each session used last; at most one entry a slot."""
        self._newest_donor: Slot | None = None
        self._idle = {slot.index: slot for slot in self.slots}
        """Slots that nobody uses, the least recently used first."""

    def donor(self, prompt: Ids, session_id: str) -> tuple[Slot | None, int]:
        """Return the slot that shares the longest prefix with ``prompt``, and its length [tokens].

        The session's own idle slot wins a tie, because nothing has to be copied from it. No other slot is
        looked at where all that it holds is in the prompt (the next turn of a conversation), or all that
        the prompt can use is in it. The last prompt token is never counted: its state has to be computed
        for the next logits.
        """
        best: Slot | None = None
        best_length = 0
        wanted = prompt[: len(prompt) - 1]
        own = self._last_of.get(session_id)
        if own is not None and own.session_id == session_id and not own.is_busy and own.length:
            best, best_length = own, common_prefix(own.tokens[: own.length], wanted)
            if best_length in (own.length, len(wanted)):
                return best, best_length
        # The members of a group come one after the other, and what served one serves the next.
        newest = self._newest_donor
        if newest is not None and not newest.is_stale:
            length = common_prefix(newest.tokens[: newest.length], wanted)
            if length > best_length:
                best, best_length = newest, length
        if best_length < len(wanted):
            usable = np.array([0 if slot.is_stale else slot.length for slot in self.slots])
            index, length = longest_prefix(self._tokens, usable, wanted, beyond=best_length)
            if length > best_length:
                best, best_length = self.slots[index], length
        self._newest_donor = best
        return best, best_length

    def acquire(self, session_id: str, donor: Slot | None) -> Slot | None:
        """Take an idle slot: the donor itself if idle and of this session, else the least recently used."""
        chosen = donor
        if donor is None or donor.is_busy or donor.session_id != session_id:
            chosen = self._least_missed(donor)
        if chosen is None:
            return None
        del self._idle[chosen.index]
        chosen.is_busy = True
        if self._last_of.get(chosen.session_id) is chosen:
            del self._last_of[chosen.session_id]
        chosen.session_id = session_id
        self._last_of[session_id] = chosen
        return chosen

    def _least_missed(self, donor: Slot | None) -> Slot | None:
        """Return an empty idle slot, else the least recently used, the donor only where it is the last."""
        others = [slot for slot in self._idle.values() if slot is not donor]
        if not others:
            return donor if donor is not None and not donor.is_busy else None
        return next((slot for slot in others if not slot.length), others[0])

    def release(self, slot: Slot) -> None:
        """Give a slot back; its state stays for reuse unless it is stale."""
        slot.is_busy = False
        self._idle[slot.index] = slot
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


def longest_prefix(
    rows: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    lengths: Ids,
    tokens: Ids,
    *,
    beyond: int,
) -> tuple[int, int]:
    """Return which row shares more than ``beyond`` leading tokens, and most of all, and how many.

    Only ``rows[i, :lengths[i]]`` counts; without such a row the number is at most ``beyond``. Whoever
    shares more has the token behind ``beyond``, which leaves few rows. A block of ``tokens`` is compared
    with all of them at once, and only those that hold all of it go on to the next block.
    """
    candidates = np.flatnonzero((lengths > beyond) & (rows[:, beyond] == tokens[beyond]))
    start = 0
    while len(candidates):
        block = tokens[start : start + _BLOCK_TOKENS]
        end = start + len(block)
        different = rows[candidates, start:end] != block
        shared = np.minimum(lengths[candidates] - start, len(block))
        shared = np.where(
            different.any(axis=1), np.minimum(shared, different.argmax(axis=1)), shared
        )
        best = int(shared.argmax())
        if shared[best] < len(block) or end == len(tokens):
            return int(candidates[best]), start + int(shared[best])
        candidates = candidates[shared == len(block)]
        start = end
    return 0, 0
