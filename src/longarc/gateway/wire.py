"""What a client is told of an error: status, type and code, as the OpenAI dialects spell them.

The Anthropic dialect takes status and message and spells the type itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from longarc.errors import (
    ConfigError,
    EngineBusyError,
    EngineError,
    EngineRequestError,
    LongArcError,
    ResourceError,
)
from longarc.gateway.budget import BudgetExhausted
from longarc.gateway.session_settings import SessionClosed
from longarc.records.ports import ContextExhausted

MAX_SHOWN_CHARS: Final = 80
"""Of a value that is refused."""


@dataclass(slots=True)
class WireError(LongArcError):
    """A request that gets an error response; the message says what to change."""

    status: int
    message: str
    param: str | None = None
    """The field that is wrong, such as ``messages[2].content``."""
    code: str | None = None
    kind: str = "invalid_request_error"
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def unauthorized(message: str) -> WireError:
    """No key, or a wrong one."""
    return WireError(401, message, code="invalid_api_key")


def not_found(message: str) -> WireError:
    """No such session or path."""
    return WireError(404, message, code="not_found")


def unknown_model(name: str, names: Sequence[str]) -> WireError:
    """A model that is not served here."""
    shown = name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}..."
    allowed = " or ".join(map(repr, names))
    return WireError(
        404,
        f"the model {shown!r} does not exist here; send model={allowed}, as /v1/models lists",
        param="model",
        code="model_not_found",
    )


def unsupported(name: str, value: object, allowed: str) -> WireError:
    """An option that this gateway does not implement: refused, because ignoring it would mislead."""
    return WireError(
        400,
        f"{name}={value!r} is not supported by this gateway; {allowed}",
        param=name,
        code="unsupported_value",
    )


def busy(limit: int, of: str = "") -> WireError:
    """More requests at once than the gateway takes, or than it takes of one session."""
    return _later(f"the gateway already answers {limit} requests{of}; try again when one has ended")


def too_long(max_bytes: int) -> WireError:
    """A body over the limit."""
    return WireError(
        413,
        f"the body is longer than {max_bytes} bytes, the limit of this gateway; shorten the history",
        code="request_too_large",
    )


def too_slow(limit_s: float) -> WireError:
    """A body that does not come."""
    return WireError(
        408,
        f"the body did not arrive within {limit_s:g} s; send it again",
        code="request_timeout",
        headers={"connection": "close"},
    )


def as_wire(error: LongArcError | ContextExhausted) -> WireError:
    """Return what a client is told of an error that happened on the way to its answer."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, BudgetExhausted):
        if error.is_final:
            return WireError(403, str(error), code="session_budget_exhausted")
        return _later(str(error))
    if isinstance(error, ContextExhausted):
        return WireError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, SessionClosed):
        return not_found(str(error))
    if isinstance(error, ConfigError | EngineRequestError):  # the same request would fail again
        return WireError(400, str(error))
    if isinstance(error, EngineBusyError):
        return _later(str(error))
    if isinstance(error, EngineError | ResourceError):
        # Nothing was recorded, so the client's own retry is safe.
        return WireError(
            503,
            str(error),
            kind="server_error",
            code="engine_error" if isinstance(error, EngineError) else "out_of_resources",
            headers={"retry-after": "1"},
        )
    return WireError(500, str(error), kind="server_error", code="internal_error")


def _later(message: str) -> WireError:
    return WireError(
        429,
        message,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"retry-after": "1"},
    )
