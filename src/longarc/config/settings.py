"""The base of every settings class."""

from collections.abc import Collection
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


def problems_of(error: ValidationError, *, nulls: Collection[str] = ()) -> str:
    """Return in one line what was wrong: field, what it may be, and what it was.

    Args:
        error: what pydantic found.
        nulls: fields that were there with a null, which was left out because it stands for a default.
    """
    return "; ".join(_problem(problem, nulls) for problem in error.errors(include_url=False))


def _problem(problem: ErrorDetails, nulls: Collection[str]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    field = ".".join(map(str, problem["loc"]))
    if not field:
        return message  # a rule between fields belongs to none, and says itself what they were
    if problem["type"] != "missing":
        return f"{field}: {message}, not {short_repr(problem['input'])}"
    return f"{field}: null, but it has no default" if field in nulls else f"{field}: {message}"
