"""Settings of task families: from the keywords of a recipe to a checked, frozen object."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from longarc.config.settings import Settings
from longarc.errors import ConfigError

AnySettings = TypeVar("AnySettings", bound=Settings)


def _ordered(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"{list(bounds)} is empty; write [low, high] with low <= high")
    return bounds


_AtLeastOne: TypeAlias = Annotated[int, Field(ge=1)]
Range: TypeAlias = Annotated[tuple[_AtLeastOne, _AtLeastOne], AfterValidator(_ordered)]
"""[low, high], both inclusive and at least 1."""
Frac: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""A share."""


class FamilySettings(Settings):
    """What every generated family has."""

    seed: int = Field(0, ge=0)
    """Another seed gives other tasks."""
    num_test_tasks: int = Field(1024, ge=1)
    """Length of the test split [tasks]; the train split never ends."""


def settings_from(kind: type[AnySettings], given: Mapping[str, Any], *, family: str) -> AnySettings:
    """Return the settings of a task family.

    Raises:
        ConfigError: a key is unknown (the nearest one is named), or a value is not allowed.
    """
    for key in given:
        if key not in kind.model_fields:
            near = difflib.get_close_matches(key, kind.model_fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {sorted(kind.model_fields)}"
            raise ConfigError(f"task family {family!r} has no setting {key!r}; {hint}")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"task family {family!r}: {where or 'settings'} = {first['input']!r}: {first['msg']}"
        ) from error
