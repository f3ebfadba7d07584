"""What the three dialects have in common: a request understood, and who writes its answer.

::

    body --Dialect.read--> Exchange.request --session--> answers --Exchange.whole--> JSON
                                        \\--deltas--> opening, delta..., closing --> events

An exchange is one request's codec: it knows the dialect, the request, and nothing of sessions or tokens
beyond the answers it is given.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from longarc.gateway.session import Answer
from longarc.gateway.streaming import Delta
from longarc.gateway.wire import MAX_SHOWN_CHARS, WireError
from longarc.records.message import Json, Message, ToolCall, ToolSpec
from longarc.tokens.tokenizer import Tokenizer

MALFORMED: Final = "malformed_call__"
"""Begins the name of a call that cannot be read, in dialects whose arguments are always an object: no client has
a tool of that name, so nothing runs, and the call's own id is answered with an error."""
MAX_CHOICES: Final = 16
"""Most answers to one request."""
MAX_STOPS: Final = 16
"""Most stop strings of a request."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that has to be called."""

    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request of any dialect, understood. What is None was not asked for."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = "auto"
    one_call: bool = False
    """Whether the answer may hold one call at most."""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    thinking: bool | None = None
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    streams: bool = False
    json_schema: str | None = None
    """JSON Schema that the answer's text has to follow, as JSON."""
    previous_id: str | None = None
    """Id of the answer that the messages go on from; where it is given they are not the whole conversation."""
    stores: bool = False
    """Whether a later request may go on from this answer by its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an exchange needs besides the body."""

    tokenizer: Tokenizer
    created_s: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the request, names in lower case."""
    new_id: Callable[[str], str] = lambda prefix: f"{prefix}{secrets.token_hex(12)}"
    """Makes an id that was never used before."""


class Exchange(Protocol):
    """The codec of one request."""

    @property
    def request(self) -> ChatRequest:
        """What was asked."""
        ...

    @property
    def response_id(self) -> str:
        """Id of the answer."""
        ...

    @property
    def call_id_prefix(self) -> str:
        """Begins the ids of this answer's calls, and of no other's."""
        ...

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...

    def opening(self) -> bytes:
        """Return the events before the first delta."""
        ...

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Return the events of one delta."""
        ...

    def ping(self) -> bytes:
        """Return what keeps a silent stream alive."""
        ...

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """Return the last events."""
        ...

    def failure(self, error: WireError) -> bytes:
        """Return the events of a stream that fails after it has begun."""
        ...


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def read(self, body: bytes, around: Surroundings) -> Exchange:
        """Understand a request.

        Raises:
            WireError: 400, naming the field that is wrong or not supported.
        """
        ...

    def error(self, error: WireError) -> dict[str, Any]:
        """Return an error's body."""
        ...


class Wire(BaseModel):
    """Base of what clients send back: fields of their own (ids, annotations, status) are not our business."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def refusal(error: ValidationError, what: str) -> WireError:
    """Return the 400 that names the first field that is wrong."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_model(part):
            path += f".{part}" if path else part
    told = f"{path}: {first['msg']}" if path else first["msg"]
    if path and isinstance(first["input"], int | float | str):
        told += f", got {str(first['input'])[:MAX_SHOWN_CHARS]!r}"
    return WireError(400, f"the request is not {what}: {told}", param=path or None)


def _is_model(part: str) -> bool:
    """Whether a part of a location is the name of a union's member, which means nothing to a client.

    Members are classes (``_TextPart``), types (``list[...]``, ``str``) or values of ``type`` and ``role``.
    """
    return part.startswith(("_", "list[", "function-", "tagged-union")) or part in _MEMBERS


_MEMBERS: Final = frozenset(
    "str system developer user assistant tool text thinking redacted_thinking tool_use tool_result "
    "input_text output_text message function_call function_call_output custom_tool_call "
    "custom_tool_call_output reasoning enabled disabled adaptive json_schema json_object".split()
)


def json_text(arguments: Mapping[str, Json]) -> str:
    """Return a call's arguments as JSON."""
    return _encode(arguments)


def call_text(call: ToolCall) -> str:
    """Return a call's arguments as text; what cannot be read is no JSON, so that no client runs it."""
    return f"malformed call: {call.error}" if call.error else _encode(call.arguments)
