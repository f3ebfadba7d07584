"""Evaluate the checkpoints of a run on held-out tasks, sampled as in training with the real tools.

Results go to stages/eval-N/results.json of the run, where the report finds them; an evaluation that
was cut off goes on when the same command is given again.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longarc.cli._exit import ExitCode
from longarc.cli._numbers import positive_int
from longarc.cli._recipe import recipe_of_run

if TYPE_CHECKING:
    from longarc.config.recipe import Recipe
    from longarc.config.stages import EvalConfig

SUMMARY = "evaluate the checkpoints of a run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "run_dir", type=Path, nargs="?", default=Path("runs/quickstart"), metavar="RUN"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="as many tasks as the recipe's tasks_per_family_full, and every stage from the first evaluated one on",
    )
    parser.add_argument("--tasks", type=positive_int, metavar="N", help="tasks per family, instead")
    parser.add_argument(
        "--stages",
        nargs="+",
        metavar="STAGE",
        help="only these checkpoints, of any training stage; initial: what the recipe starts from",
    )
    parser.add_argument("--families", nargs="+", metavar="FAMILY", help="only these families")


def run(arguments: argparse.Namespace) -> int:
    """Fill the matrix and print it."""
    import asyncio

    import orjson

    from longarc.config.recipe import INITIAL
    from longarc.pipeline.evaluation import evaluate, matrix_lines
    from longarc.pipeline.local import Interrupted, open_workspace, stopping_on_signals
    from longarc.pipeline.progress import ProgressLine
    from longarc.pipeline.reporting import write_report

    recipe = recipe_of_run(arguments.run_dir)
    config = _eval_config(recipe)
    num_tasks = arguments.tasks or (
        config.tasks_per_family_full if arguments.full else config.tasks_per_family
    )
    trained = [] if recipe.initial is None else [INITIAL]
    trained += [name for name, stage in recipe.stages.items() if stage.kind != "eval"]
    usual = trained[trained.index(config.stages[0]) :] if arguments.full else config.stages
    stages = _chosen(arguments.stages, trained, "stages") or usual
    families = _chosen(arguments.families, sorted(config.tasks), "families") or sorted(config.tasks)
    progress = ProgressLine()
    with open_workspace(recipe, arguments.run_dir, resume=True, progress=progress) as workspace:

        async def fill() -> Path:
            with stopping_on_signals(workspace.stop):
                return await evaluate(
                    workspace,
                    f"eval-{num_tasks}",
                    config,
                    stages=stages,
                    families=families,
                    num_tasks=num_tasks,
                )

        try:
            path = asyncio.run(fill())
        except Interrupted:
            progress.say("stopped; give the same command again to go on")
            return ExitCode.INTERRUPTED
    # Before the report, for which there may be no room.
    for line in matrix_lines(orjson.loads(path.read_bytes())["cells"]):
        print(line)
    write_report(arguments.run_dir)
    return ExitCode.OK


def _eval_config(recipe: "Recipe") -> "EvalConfig":
    from longarc.config.stages import EvalConfig
    from longarc.errors import ConfigError

    for config in recipe.stages.values():
        if isinstance(config, EvalConfig):
            return config
    raise ConfigError(
        f"recipe {recipe.name!r} has no eval stage, so nothing says what to evaluate; add [stages.eval]"
    )


def _chosen(asked: list[str] | None, allowed: list[str], what: str) -> list[str]:
    from longarc.errors import ConfigError

    unknown = sorted(set(asked or []) - set(allowed))
    if unknown:
        raise ConfigError(f"--{what} {' '.join(unknown)}: the recipe has {allowed}")
    return asked or []
