"""The keys of a session's conversations, without hashing again what a client sends again."""

from collections.abc import Sequence
from dataclasses import dataclass

from longarc.gateway.identity import next_key
from longarc.gateway.openings import Openings
from longarc.records.message import Message, ToolSpec

_NUM_CONVERSATIONS = 4
"""Agents of one session that take turns without hashing their histories again."""


@dataclass(slots=True)
class _Conversation:
    """The newest request of one agent."""

    opening: bytes
    messages: Sequence[Message]
    keys: list[bytes]


class KeyChain:
    """Turns conversations into the keys of their prefixes."""

    def __init__(self, openings: Openings) -> None:
        self._openings = openings
        self._opening: tuple[tuple[ToolSpec, ...], bool, bytes] | None = None
        self._recent: list[_Conversation] = []
        self._newest: tuple[bytes, Message, bytes] | None = None

    def keys(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], *, thinking: bool
    ) -> list[bytes]:
        """Return the identity of each prefix; what equals a recent request is not hashed again.

        Args:
            messages: the conversation, not empty.
            tools: the tools of its prompt.
            thinking: whether its answer begins with reasoning.
        """
        opening = self._opening_key(tools, thinking=thinking)
        known = next(
            (c for c in self._recent if c.opening == opening and c.messages[0] == messages[0]), None
        )
        keys: list[bytes] = []
        if known is not None:
            self._recent.remove(known)
            for message, old, key in zip(messages, known.messages, known.keys, strict=False):
                # Equal arguments may be others to a template: true and 1.
                if message is not old and (message.tool_calls or message != old):
                    break
                keys.append(key)
        for message in messages[len(keys) :]:
            keys.append(self._next_key(keys[-1] if keys else opening, message))
        self._recent.insert(0, _Conversation(opening, list(messages), keys))
        del self._recent[_NUM_CONVERSATIONS:]
        return keys

    def add(self, previous: bytes, answer: Message) -> bytes:
        """Return the key of a conversation that ends with a new answer."""
        key = next_key(previous, answer)
        self._newest = (previous, answer, key)
        return key

    def forget(self) -> None:
        """Drop what is only there to save time."""
        self._opening = None
        self._recent.clear()
        self._newest = None

    @property
    def num_chars(self) -> int:
        """Text that is kept, about."""
        return sum(len(m.content) for c in self._recent for m in c.messages)

    def _opening_key(self, tools: tuple[ToolSpec, ...], *, thinking: bool) -> bytes:
        """Return the key of what stands before the first message; it is the same for most requests."""
        if self._opening is None or self._opening[:2] != (tools, thinking):
            self._opening = (tools, thinking, self._openings.key(tools, thinking=thinking))
        return self._opening[2]

    def _next_key(self, previous: bytes, message: Message) -> bytes:
        """Return ``next_key``, which is known of the newest answer where that very object comes back."""
        if self._newest is not None:
            before, answer, key = self._newest
            if message is answer and previous == before:
                return key
        return next_key(previous, message)
