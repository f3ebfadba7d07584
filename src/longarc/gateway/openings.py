"""What conversations open with, worked out once for all sessions that open alike.

The members of a group have one task, and all rollouts of a family the same tools. Alike means the very
same objects: tools or messages that are merely equal may be spelt apart, as 1 and 1.0 are.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from operator import is_
from typing import Generic, TypeVar

from longarc.gateway.identity import opening_key
from longarc.gateway.tree import id_array
from longarc.records.message import Message, Role, ToolSpec
from longarc.tokens.chat_format import ChatFormat

_NUM_REMEMBERED = 16
_ANY_QUESTION = Message(role=Role.USER, content="?")

Value = TypeVar("Value")


class Openings:
    """Keys and prompts that sessions of one gateway begin with; shared by them all."""

    def __init__(self, chat_format: ChatFormat, *, clear_thinking: bool) -> None:
        self._format = chat_format
        self._clear_thinking = clear_thinking
        self._keys = _Recent[bytes]()
        self._prompts = _Recent["array[int]"]()

    def key(self, tools: Sequence[ToolSpec], *, thinking: bool) -> bytes:
        """Return the key of what stands before the first message."""

        def key() -> bytes:
            # Templates need a message to render; this one is the same for every conversation.
            chat = self._format.render(
                (_ANY_QUESTION,), tools, thinking=thinking, add_generation_prompt=False
            )
            return opening_key(self._format.name, chat.token_ids)

        return self._keys.get((*tools, thinking), key)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> "array[int]":
        """Return the prompt of a conversation of which no turn is stored; to be read only."""

        def prompt() -> "array[int]":
            chat = self._format.render(
                messages,
                tools,
                thinking=thinking,
                clear_thinking=self._clear_thinking,
                add_generation_prompt=True,
            )
            return id_array(chat.token_ids)

        return self._prompts.get((*messages, thinking, *tools), prompt)


class _Recent(Generic[Value]):
    """The newest few values, found by the identity of what they were made of."""

    def __init__(self) -> None:
        self._entries: deque[tuple[tuple[object, ...], Value]] = deque(maxlen=_NUM_REMEMBERED)

    def get(self, parts: tuple[object, ...], make: Callable[[], Value]) -> Value:
        for known, value in self._entries:
            if len(known) == len(parts) and all(map(is_, known, parts)):
                return value
        value = make()
        self._entries.append((parts, value))
        return value
