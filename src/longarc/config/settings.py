"""The base of every settings class."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every settings class: frozen, strict about unknown keys, documented by docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
