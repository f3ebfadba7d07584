"""The base of every settings class."""

import json
from collections.abc import Collection, Mapping
from reprlib import repr as short_repr
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

Read = TypeVar("Read")


class Settings(BaseModel):
    """Base of every settings class: frozen, strict about unknown keys, documented by docstring.

    Every number is finite: JSON, which the resolved recipe is kept in, has no other.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def read_strictly(kind: type[Read] | TypeAdapter[Read], values: Mapping[str, Any]) -> Read:
    """Validate what a JSON file holds as it is: a word or a boolean is no number, a fraction no whole one.

    Args:
        kind: a class that pydantic validates, or the adapter of a type.
        values: from the file; what the class ignores may be among them.

    Raises:
        ValidationError: a value is of another type, or not allowed.
    """
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    # JSON has no tuples and no enums, so pydantic's strict mode for Python's own values would refuse them.
    return adapter.validate_json(json.dumps(values), strict=True)


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
