"""The recipe argument and ``--set``, shared by the commands that take a recipe."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longarc.config.recipe import Recipe

_log = logging.getLogger(__name__)


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
    """Read the recipe that a run was started with, and warn of options that this version no longer has.

    Raises:
        ConfigError: there is no run, or its recipe is not one that this version accepts.
        ContractError: the file is damaged.
    """
    from longarc.config.recorded import read_recorded
    from longarc.runs.directory import RECIPE, RunDirectory

    path = run_dir / RECIPE
    recorded = read_recorded(RunDirectory.look(run_dir).recipe(), source=str(path))
    if recorded.removed:
        _log.warning("%s: %s", path, recorded.note())
    return recorded.recipe
