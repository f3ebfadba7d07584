"""The engine's own protocol: records as JSON and back, and errors by name.

A server speaks it (``server.py``), a client understands it (``remote.py``); neither knows a field of a
record by name. Encoding and decoding follow the dataclasses' annotations, so that a new field travels
from the day it exists, and a key that the other side does not know is refused and never dropped.

Numbers come back bit for bit: floats are written with the fewest digits that name them, and infinities
and NaN, which JSON does not have, as strings. Bytes are base64.
"""

import base64
import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import orjson

from longarc.config.engine import CacheQuantisation, WeightQuantisation
from longarc.errors import (
    ContractError,
    EngineBusyError,
    EngineError,
    EngineFaultError,
    EngineLostError,
    EngineRequestError,
    LongArcError,
    WeightsRefusedError,
)
from longarc.records.sampling import RoutingReplay, Sampling, WeightSource

PROTOCOL_VERSION = 1
"""Sent in the header below by both sides; unequal versions do not talk."""
PROTOCOL_HEADER = "x-longarc-protocol"
INSTANCE_HEADER = "x-longarc-instance"
"""Names the start of the server that answers: after another start its weights and cache are others."""

T = TypeVar("T")

_STATUS: dict[type[EngineError], int] = {
    EngineRequestError: 400,
    WeightsRefusedError: 409,
    EngineBusyError: 429,
    EngineFaultError: 500,
    EngineLostError: 503,
    EngineError: 500,
}
"""The errors that travel, and the HTTP status they travel with."""
_BY_NAME = {kind.__name__: kind for kind in _STATUS}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What a server serves."""

    model: Mapping[str, Any]
    """Settings of the model, as a checkpoint's manifest holds them."""
    attention: Literal["dense", "sparse"]
    max_context_tokens: int
    num_ranks: int
    """Engines behind the address, addressed by 0 .. num_ranks - 1."""
    weight_quantisation: WeightQuantisation = "none"
    """How the weights are rounded that it samples with."""
    records_routing: RoutingReplay = "none"
    """What of the routing of tokens it returns to who asks."""
    cache_quantisation: CacheQuantisation = "none"
    """How the rows of its cache are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """The body of ``POST /v1/stream``."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    session_id: str
    rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """The body of ``POST /v1/score``."""

    token_ids: tuple[int, ...]
    temperature: float = 1.0
    rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReply:
    """What scoring returns [nats]."""

    logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """The body of ``POST /v1/update_weights``."""

    source: WeightSource
    policy_version: int
    rank: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReply:
    """What an update returns once the new weights are in use."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WireError:
    """An error on its way; the only key of its JSON object is ``error``."""

    kind: str
    """Name of the exception class."""
    message: str


def dumps(record: object) -> bytes:
    """Return a dataclass as JSON.

    Raises:
        EngineRequestError: a field holds something that JSON cannot carry.
    """
    try:
        return orjson.dumps(plain(record))
    except (TypeError, ValueError) as error:
        raise EngineRequestError(f"{type(record).__name__} cannot be sent: {error}") from error


def loads(kind: type[T], data: bytes) -> T:
    """Return the dataclass that ``dumps`` wrote.

    Raises:
        EngineRequestError: the bytes are no JSON, or not of this record: a key is unknown or missing, or a
            value has another type.
    """
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineRequestError(f"{kind.__name__}: the body is not JSON: {error}") from error
    record: T = from_plain(kind, raw)
    return record


def plain(value: Any) -> Any:
    """Return a record as what JSON has: objects, arrays, strings, numbers, booleans and null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        # Ids and log-probabilities are most of what is sent; they need no look at each by itself.
        kinds = set(map(type, value))
        if kinds <= {int} or (kinds <= {float} and all(map(math.isfinite, value))):
            return list(value)
        return [plain(item) for item in value]
    raise TypeError(f"{value!r} of type {type(value).__name__} has no form in JSON")


def from_plain(kind: Any, raw: Any, *, where: str = "") -> Any:
    """Return ``raw`` as ``kind``: a dataclass, or a type that a field of one is annotated with.

    Raises:
        EngineRequestError: it is something else; names the place.
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, raw, where or kind.__name__)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), raw, where)
    if origin is tuple and isinstance(raw, list):
        return _tuple(get_args(kind), raw, where)
    if origin is Literal:
        return _one_of_these(get_args(kind), raw, where)
    if kind is float:
        return _float(raw, where)
    if kind is bytes:
        return _bytes(raw, where)
    if kind is Any or (
        origin is not None and issubclass(origin, Mapping) and isinstance(raw, dict)
    ):
        return raw
    if type(raw) is kind:  # exactly: true is an int for Python and a number for nobody else
        return raw
    raise EngineRequestError(f"{where}: {str(raw)[:80]!r} is not {kind}")


def _record(kind: Any, raw: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(raw, dict):
        raise EngineRequestError(f"{where}: expected an object, got {str(raw)[:80]!r}")
    unknown = raw.keys() - hints.keys()
    if unknown:
        raise EngineRequestError(
            f"{where}: unknown key {min(unknown)!r}, allowed are {sorted(hints)}. The other side may be "
            f"of another version; run the same LongArc on both"
        )
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in raw
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise EngineRequestError(f"{where}: missing {missing}; allowed are {sorted(hints)}")
    values = {name: from_plain(hints[name], raw[name], where=f"{where}.{name}") for name in raw}
    try:
        return kind(**values)
    except ContractError as error:  # a value that the record refuses
        raise EngineRequestError(f"{where}: {error}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _one_of(kinds: tuple[Any, ...], raw: Any, where: str) -> Any:
    if raw is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest[:-1]:
        try:
            return from_plain(kind, raw, where=where)
        except EngineRequestError:
            continue
    return from_plain(rest[-1], raw, where=where)


def _one_of_these(values: tuple[Any, ...], raw: Any, where: str) -> Any:
    if raw in values:
        return raw
    raise EngineRequestError(f"{where}: {str(raw)[:80]!r} is none of {list(values)}")


def _tuple(items: tuple[Any, ...], raw: list[Any], where: str) -> tuple[Any, ...]:
    if len(items) == 2 and items[1] is Ellipsis:
        if items[0] in (int, float) and set(map(type, raw)) <= {items[0]}:
            return tuple(raw)
        return tuple(from_plain(items[0], item, where=where) for item in raw)
    if len(items) != len(raw):
        raise EngineRequestError(f"{where}: {len(raw)} items, expected {len(items)}")
    return tuple(from_plain(kind, item, where=where) for kind, item in zip(items, raw, strict=True))


def _bytes(raw: Any, where: str) -> bytes:
    try:
        return base64.b64decode(raw, validate=True)
    except (TypeError, ValueError) as error:
        raise EngineRequestError(f"{where}: {str(raw)[:80]!r} is not base64: {error}") from error


def _float(raw: Any, where: str) -> float:
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
    if is_number or raw in ("inf", "-inf", "nan"):
        return float(raw)
    raise EngineRequestError(f"{where}: {str(raw)[:80]!r} is not a number")


# ------------------------------------------------------------------------- errors


def error_body(error: LongArcError) -> bytes:
    """Return an error as a line of JSON, without its cause."""
    wire = WireError(kind=_travelling(error).__name__, message=str(error))
    return orjson.dumps({"error": plain(wire)})


def error_status(error: LongArcError) -> int:
    """Return the HTTP status of an error."""
    return _STATUS[_travelling(error)]


def error_of(data: bytes, *, source: str) -> EngineError | None:
    """Return the error that a line or body holds, as the class it was raised as; None if it holds none.

    Args:
        data: what came.
        source: who sent it, for the message.
    """
    if not data.startswith(b'{"error":'):
        return None
    try:
        found = from_plain(WireError, orjson.loads(data)["error"])
    except (orjson.JSONDecodeError, EngineRequestError):
        return None
    kind = _BY_NAME.get(found.kind, EngineError)
    return kind(f"{source}: {found.message}")


def _travelling(error: LongArcError) -> type[EngineError]:
    """Return the nearest class of an error that travels; what is no engine's error is a plain one there."""
    return next((kind for kind in type(error).__mro__ if kind in _STATUS), EngineError)
