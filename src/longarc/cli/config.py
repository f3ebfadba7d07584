"""Check, show and explain recipes.

longarc config check recipes/quickstart.toml --set seed=3
longarc config show recipes/quickstart.toml
longarc config explain agentic_rl
longarc config explain loop.max_lag_steps
longarc config schema --format markdown
"""

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from longarc.cli._exit import ExitCode
from longarc.cli._recipe import add_recipe_arguments, load_recipe

if TYPE_CHECKING:
    from longarc.config.explain import Section

SUMMARY = "check, show and explain recipes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add check, show, explain and schema."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="validate a recipe and the import paths in it")
    add_recipe_arguments(check)
    show = actions.add_parser("show", help="print a recipe with every default filled in, as JSON")
    add_recipe_arguments(show)
    explain = actions.add_parser("explain", help="say what a stage, a section or an option means")
    explain.add_argument(
        "name", help="agentic_rl, optimizer, max_lag_steps, loop.max_lag_steps, stages.sft ..."
    )
    schema = actions.add_parser("schema", help="print all settings")
    schema.add_argument(
        "--format",
        choices=("json", "markdown"),
        default="json",
        help="json: JSON Schema, for editors; markdown: a page for people (default: json)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what the action says."""
    match arguments.action:
        case "check":
            return _check(arguments)
        case "show":
            recipe = load_recipe(arguments.recipe, arguments.overrides)
            print(json.dumps(recipe.model_dump(mode="json"), indent=2))
        case "explain":
            _explain(arguments.name)
        case "schema":
            _schema(arguments.format)
    return ExitCode.OK


def _check(arguments: argparse.Namespace) -> int:
    from longarc.config.load_object import check_import_path

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    for path in _import_paths(recipe.model_dump(mode="json")):
        check_import_path(path)
    stages = ", ".join(recipe.stages)
    print(f"{arguments.recipe}: ok; {recipe.name} runs {len(recipe.stages)} stage(s): {stages}")
    return ExitCode.OK


def _import_paths(tree: Any) -> Iterator[str]:
    """Yield every ``path = "package.module:attribute"`` of a recipe."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "path" and isinstance(value, str) and re.fullmatch(r"[\w.]+:[\w.]+", value):
                yield value
            else:
                yield from _import_paths(value)


def _explain(name: str) -> None:
    from longarc.config.explain import find_options
    from longarc.config.recipe import Recipe

    for position, section in enumerate(find_options(Recipe, name)):
        if position:
            print()
        _print_section(section)


def _print_section(section: "Section") -> None:
    tags = f" ({', '.join(section.tags)})" if section.tags else ""
    print(f"{section.name}{tags}, at {', '.join(section.places)}")
    print(section.description)
    for option in section.options:
        print(f"\n  {option.key}: {option.type} {option.allowed}".rstrip())
        unit = f"  unit: {option.unit}" if option.unit else ""
        print(f"      default: {option.default}{unit}")
        print(
            textwrap.fill(option.description, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
        )


def _schema(form: str) -> None:
    from longarc.config.explain import json_schema, markdown
    from longarc.config.recipe import Recipe

    print(
        json_schema(Recipe) if form == "json" else markdown(Recipe),
        end="" if form != "json" else "\n",
    )
