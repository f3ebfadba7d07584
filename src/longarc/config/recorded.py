"""The recipe that a run recorded, as this version reads it.

Options come and go between versions. One that is newer than the run has its default, with which a run does what it
did before there was the option; one that is gone is left out, and named.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from longarc.config.loader import validated
from longarc.config.recipe import Recipe
from longarc.config.schema import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was read."""

    recipe: Recipe
    """All that this version knows, whole."""
    removed: Mapping[str, Any]
    """Options that this version does not know, with their values, by dotted key."""

    def note(self) -> str:
        """Say in one line what was left out; nothing where nothing was."""
        if not self.removed:
            return ""
        shown = ", ".join(f"{key} = {value!r}" for key, value in self.removed.items())
        return f"left out, because this version of LongArc has no such options: {shown}"


def read_recorded(tree: Mapping[str, Any], *, source: str) -> Recorded:
    """Read a recipe that another version of LongArc may have written.

    Args:
        tree: content of ``recipe.json``.
        source: where it comes from, for messages.

    Raises:
        ConfigError: this version refuses the value of an option.
    """
    known = deepcopy(dict(tree))
    removed: dict[str, Any] = {}
    while paths := _unknown_paths(known):
        for path in paths:
            removed[".".join(map(str, path))] = _take(known, path)
    return Recorded(recipe=validated(Recipe, known, source=source), removed=removed)


def _unknown_paths(tree: Mapping[str, Any]) -> list[list[str | int]]:
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        found = [
            d["loc"] for d in error.errors(include_url=False) if d["type"] == "extra_forbidden"
        ]
        schema = Schema(Recipe) if found else None
        return [schema.locate(location)[0] for location in found] if schema else []
    return []


def _take(tree: dict[str, Any], path: Sequence[str | int]) -> Any:
    node: Any = tree
    for key in path[:-1]:
        node = node[key]
    return node.pop(path[-1])
