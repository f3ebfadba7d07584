"""Run a recipe, from its first stage or from where an earlier start stopped.

Ctrl-C finishes the step in progress, saves and exits with 130; ``--resume`` goes on from there, as it
does after a crash. ``--replay STAGE:STEP`` takes a recorded step again from its checkpoint and says
whether the weights come out bit for bit the same.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longarc.cli._exit import ExitCode
from longarc.cli._recipe import add_recipe_arguments, load_recipe, recipe_of_run

if TYPE_CHECKING:
    from longarc.config.recipe import Recipe

SUMMARY = "run a recipe"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="D", help="where the run goes; runs/NAME by default"
    )
    parser.add_argument("--resume", action="store_true", help="go on where the run stopped")
    parser.add_argument(
        "--replay", metavar="STAGE:STEP", help="recompute one recorded step of a finished run"
    )
    parser.add_argument(
        "--servers-later",
        action="store_true",
        help="begin although the servers of engine.servers or engine.url do not answer yet: a stage that samples "
        "there asks again",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the recipe and write the report."""
    import asyncio

    from longarc.pipeline.local import Interrupted, open_workspace, run_recipe
    from longarc.pipeline.preflight import check_recipe
    from longarc.pipeline.progress import ProgressLine
    from longarc.pipeline.replay import replay_step
    from longarc.pipeline.reporting import write_report
    from longarc.runs.directory import RECIPE

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    run_dir: Path = arguments.run_dir or Path("runs") / recipe.name
    progress = ProgressLine()
    if arguments.replay is not None:
        _refuse_with_replay(arguments)
        recorded, computed = replay_step(recipe, run_dir, arguments.replay)
        return _say_replay(arguments.replay, recorded.weights_sha256, computed.weights_sha256)
    check_recipe(recipe, is_new=not arguments.resume)
    _check_servers(recipe, run_dir, are_later=arguments.servers_later)
    if arguments.resume and (run_dir / RECIPE).is_file():
        recipe_of_run(run_dir)  # for its warning; resuming compares the two
    with open_workspace(recipe, run_dir, resume=arguments.resume, progress=progress) as workspace:
        try:
            asyncio.run(run_recipe(workspace))
        except Interrupted:
            progress.say(
                f"stopped and saved; go on with: longarc run {arguments.recipe} --run-dir {run_dir} --resume"
            )
            return ExitCode.INTERRUPTED
    progress.say(f"report: {write_report(run_dir)}")
    return ExitCode.OK


def _refuse_with_replay(arguments: argparse.Namespace) -> None:
    from longarc.errors import ConfigError

    for option in ("resume", "servers_later"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--{option.replace('_', '-')} has no effect with --replay, which takes a recorded step again and "
                f"changes nothing; leave one of them out"
            )


def _check_servers(recipe: "Recipe", run_dir: Path, *, are_later: bool) -> None:
    import asyncio

    from longarc.errors import ConfigError
    from longarc.pipeline.server_preflight import check_servers, servers_to_ask
    from longarc.runs.directory import RECIPE, RunDirectory

    if are_later:
        if not servers_to_ask(recipe):
            raise ConfigError(
                "--servers-later has no effect: no stage of the recipe samples at engine.servers or engine.url; "
                "leave it out"
            )
        return
    finished: list[str] = []
    if (run_dir / RECIPE).is_file():
        run = RunDirectory.look(run_dir)
        finished = [name for name in recipe.stages if run.stage(name).final() is not None]
    asyncio.run(check_servers(recipe, finished=finished))


def _say_replay(where: str, recorded: str, computed: str) -> int:
    is_equal = recorded == computed
    print(f"{where}: recorded weights {recorded[:16]}, recomputed {computed[:16]}")
    print(
        "bit-identical" if is_equal else "DIFFERENT: another machine, torch version or thread count"
    )
    return ExitCode.OK if is_equal else ExitCode.FAILED
