"""Errors as the OpenAI dialect spells them, one place for status, type and code."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from longarc.errors import LongArcError

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


def busy(limit: int) -> WireError:
    """More requests at once than the gateway takes."""
    return WireError(
        429,
        f"the gateway already answers {limit} requests; try again when one has ended",
        code="rate_limit_exceeded",
        kind="rate_limit_error",
        headers={"retry-after": "1"},
    )
