"""The chat-level vocabulary: messages, tool calls and tool descriptions, independent of any wire format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value."""


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool that the policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON Schema of the arguments object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the policy made; invalid calls are kept, because they are data."""

    id: str
    name: str
    arguments: Mapping[str, Json]
    """The parsed arguments; empty when ``error`` is set."""
    error: str | None = None
    """Why the call cannot be run (not an object, unterminated, ...); None when it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    reasoning: str | None = None
    """Thinking text of an assistant message, without its tags; None when there was none."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call that a tool message answers."""
