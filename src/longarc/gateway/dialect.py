"""What the three dialects have in common: a request understood, and who writes its answer.

::

    body --Dialect.read--> Exchange.request --session--> answers --Exchange.whole--> JSON
                                        \\--deltas--> opening, delta..., closing --> events

An exchange is one request's codec: it knows the dialect, the request, and nothing of sessions or tokens
beyond the answers it is given.
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from longarc.gateway.answers import Answer
from longarc.gateway.reading import ReadHistory
from longarc.gateway.streaming import Delta
from longarc.gateway.turn_options import TurnStart
from longarc.gateway.wire import MAX_SHOWN_CHARS, WireError, unsupported
from longarc.records.message import Message, ToolCall, ToolSpec
from longarc.tokens.arguments import dump_json
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
    num_instructions: int = 0
    """Messages at the beginning that belong to this request alone."""
    stores: bool = False
    """Whether a later request may go on from this answer by its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an exchange needs besides the body."""

    tokenizer: Tokenizer
    created_s: int
    new_id: Callable[[str], str] = lambda prefix: f"{prefix}{secrets.token_hex(12)}"
    """Makes an id that was never used before."""
    history: ReadHistory = field(default_factory=ReadHistory)
    """What the session's clients sent before."""


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

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...

    def opening(self, start: TurnStart) -> bytes:
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
    """Base of what clients send back: fields of their own (ids, annotations, status) are not our business.

    A word is no number and a number no truth value: what is guessed in one request is missed in another.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE: Final = BeforeValidator(_whole)
MAX_COUNT: Final = 2**31 - 1
"""Largest number of anything that a request may ask for; turn logs hold 64 bits, engines mostly 32."""
"""Of a field that is a whole number: JSON has one kind of number, so 4096.0 is 4096."""


def _boolean(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError("it is neither true nor false")  # noqa: TRY004 pydantic tells of this one
    return value


BOOLEAN: Final = BeforeValidator(_boolean)
"""Of a field that has one truth value only, to which the number of the same value in Python is equal."""


def refusal(error: ValidationError, body: bytes, what: str) -> WireError:
    """Return the 400 that names the first field that is wrong, as the client spells its place."""
    told_of = error.errors(include_url=False)
    value = _json_or_none(body)
    # Of a field that may be several things, the reading that came furthest is the one that was meant.
    first = max(
        (e for e in told_of if e["loc"][:1] == told_of[0]["loc"][:1]), key=lambda e: len(e["loc"])
    )
    path = _client_path(first["loc"], value, is_missing=first["type"] == "missing")
    told = f"{path}: {first['msg']}" if path else first["msg"]
    if path and isinstance(first["input"], int | float | str):
        told += f", got {str(first['input'])[:MAX_SHOWN_CHARS]!r}"
    return WireError(400, f"the request is not {what}: {told}", param=path or None)


def _client_path(location: Sequence[int | str], value: object, *, is_missing: bool) -> str:
    """Return a location without the parts that only name members of unions, which no client knows."""
    path = ""
    for position, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict):
            is_last = position == len(location) - 1
            if part in value or (is_last and is_missing):
                path += f".{part}" if path else part
                value = value.get(part)
    return path


def _json_or_none(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def check_extra(
    extra: Mapping[str, object] | None,
    *,
    without_effect: Collection[str],
    only: Mapping[str, Sequence[object]],
) -> None:
    """Refuse options of a request that this gateway does not implement.

    Args:
        extra: the fields that no model names.
        without_effect: fields that do not change the answer.
        only: fields that are accepted at the values that ask for nothing.

    Raises:
        WireError: 400, naming the option and what may be sent.
    """
    for name, value in (extra or {}).items():
        if value is None or name in without_effect:
            continue
        if name not in only:
            raise unsupported(name, value, "leave it out")
        # False is 0 in Python and not in JSON.
        if not any(
            value == option and isinstance(value, bool) is isinstance(option, bool)
            for option in only[name]
        ):
            allowed = " or ".join(repr(option) for option in only[name])
            raise unsupported(name, value, f"leave it out or send {allowed}")


def checked_stop(stop: Sequence[str], name: str) -> tuple[str, ...]:
    """Return stop strings.

    Raises:
        WireError: 400, there are too many, or one is empty.
    """
    if len(stop) > MAX_STOPS or not all(stop):
        raise WireError(
            400,
            f"{name} holds {len(stop)} texts; send at most {MAX_STOPS}, none of them empty",
            param=name,
        )
    return tuple(dict.fromkeys(stop))


def call_text(call: ToolCall) -> str:
    """Return a call's arguments as text; what cannot be read is no JSON, so that no client runs it."""
    return f"malformed call: {call.error}" if call.error else dump_json(call.arguments)


def json_bytes(data: object) -> bytes:
    """Return JSON; what a client sent may hold integers that the fast encoder refuses."""
    try:
        return orjson.dumps(data)
    except TypeError:
        return json.dumps(data, ensure_ascii=False).encode("utf-8", "replace")


def event(data: object, *, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(data) + b"\n\n"
