"""The base of every settings class."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every settings class: frozen, strict about unknown keys, documented by docstring.

    Every number is finite: JSON, which the resolved recipe is kept in, has no other.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
