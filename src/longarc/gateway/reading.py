"""What a session's clients sent last, so that a history that comes again is not read again.

Every request of a chat API brings the whole conversation. Of a long one, checking and converting it costs more
than all else together, and all but its end was checked and converted before. What is equal as JSON is the same
message, so the objects that were made of it are used again, which also makes comparing them quick.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from longarc.records.message import Message

RawMessage: TypeAlias = Any
"""A message as JSON has it, of a dialect in which values that are equal in Python are equal in meaning."""

_NUM_CONVERSATIONS = 4
"""Agents of one session that take turns."""


class ReadHistory:
    """The newest conversations of one session, as they were sent and as they were read."""

    def __init__(self) -> None:
        self._recent: list[tuple[Sequence[RawMessage], tuple[Message, ...]]] = []

    def known(self, raw: Sequence[RawMessage]) -> tuple[Message, ...]:
        """Return what the longest known beginning was read as; a message each, and never all of them."""
        longest: tuple[Message, ...] = ()
        for known_raw, read in self._recent:
            count = _num_equal(raw[:-1], known_raw)
            if count > len(longest):
                longest = read[:count]
        return longest

    def keep(self, raw: Sequence[RawMessage], read: tuple[Message, ...]) -> None:
        """Remember a conversation in place of the one that it goes on from."""
        for index, (known_raw, _) in enumerate(self._recent):
            count = _num_equal(raw, known_raw)
            if count and count >= len(known_raw) - 1:
                # The objects that are there already; two copies of a text would be kept otherwise.
                raw = [*known_raw[:count], *raw[count:]]
                del self._recent[index]
                break
        self._recent.insert(0, (raw, read))
        del self._recent[_NUM_CONVERSATIONS:]

    def forget(self) -> None:
        """Drop everything; it is only there to save time."""
        self._recent.clear()


def _num_equal(one: Sequence[RawMessage], other: Sequence[RawMessage]) -> int:
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count
