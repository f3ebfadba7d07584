"""The base of every settings class."""

from reprlib import repr as short_repr

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class Settings(BaseModel):
    """Base of every settings class: frozen, strict about unknown keys, documented by docstring.

    Every number is finite: JSON, which the resolved recipe is kept in, has no other.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def problems_of(error: ValidationError) -> str:
    """Return in one line what was wrong: field, what it may be, and what it was."""
    return "; ".join(map(_problem, error.errors(include_url=False)))


def _problem(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    field = ".".join(map(str, problem["loc"]))
    if not field:
        return message  # a rule between fields belongs to none, and says itself what they were
    what = "" if problem["type"] == "missing" else f", not {short_repr(problem['input'])}"
    return f"{field}: {message}{what}"
