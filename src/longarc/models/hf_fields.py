"""Single fields of a ``config.json`` as they stand there: no number is made of what is none."""

import math
from collections.abc import Container, Mapping
from reprlib import repr as short_repr
from typing import Any, Final

from longarc.errors import ConfigError

_MOST: Final = 1 << 53
"""Whole numbers beyond this are not exact in every program that reads JSON, and no size of a model."""
_COPY: Final = "copy it again from where the weights come from"

_OBJECTS: Final = ("rope_parameters", "rope_scaling")


def check_numbers(
    raw: Mapping[str, Any], names: Container[str] | None = None, *, where: str = ""
) -> None:
    """Refuse numbers that nothing can be computed with: infinite, not a number, or beyond what a float holds exactly.

    Args:
        raw: content of ``config.json``, or of an object in it.
        names: of the fields that are read; None checks all. What describes the rotation is checked whole.
        where: what comes before the names of its fields, for messages.

    Raises:
        ConfigError: names the field.
    """
    for name, value in raw.items():
        if name in _OBJECTS and isinstance(value, Mapping):
            check_numbers(value, where=f"{name}.")
        elif names is not None and name not in names:
            continue
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{where}{name}={value!r} in config.json is not a finite number; {_COPY}"
            )
        elif isinstance(value, int) and abs(value) > _MOST:
            raise ConfigError(
                f"{where}{name}={short_repr(value)} in config.json is beyond any size of a model; {_COPY}"
            )


def is_said(raw: Mapping[str, Any], name: str, value: object) -> bool:
    """Say whether a field has a value or is not there; ``0`` and ``1`` are no booleans."""
    said = raw.get(name, value)
    return said == value and isinstance(said, bool) == isinstance(value, bool)
