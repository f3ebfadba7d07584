"""The recipe argument and ``--set``, shared by the commands that take a recipe."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longarc.config.recipe import Recipe


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``RECIPE`` and ``--set``."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a TOML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting, e.g. stages.sft.num_steps=10; may be repeated, the last one wins",
    )


def load_recipe(path: Path, overrides: Sequence[str]) -> "Recipe":
    """Read and validate a recipe.

    Raises:
        ConfigError: the file, a key or a value is wrong.
    """
    from longarc.config.loader import load_settings
    from longarc.config.recipe import Recipe

    return load_settings(Recipe, path, overrides=overrides)


def recipe_of_run(run_dir: Path) -> "Recipe":
    """Read the recipe that a run was started with.

    Raises:
        ConfigError: there is no run, or its recipe is not one that this version accepts.
        ContractError: the file is damaged.
    """
    from longarc.config.loader import validated
    from longarc.config.recipe import Recipe
    from longarc.runs.directory import RECIPE, RunDirectory

    return validated(Recipe, RunDirectory.look(run_dir).recipe(), source=str(run_dir / RECIPE))
