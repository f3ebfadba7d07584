"""List, show, audit and compare runs; take trajectories out, and put others in.

longarc runs list
longarc runs show runs/quickstart
longarc runs show runs/quickstart agentic_rl/12/3/0
longarc runs audit runs/quickstart
longarc runs diff runs/a runs/b
longarc runs export runs/quickstart --stage agentic_rl --format atif --out trajectories
longarc runs import runs/quickstart jobs/2026-10-01
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longarc.cli._exit import ExitCode
from longarc.errors import ConfigError, LongArcError

SUMMARY = "list, show, audit and compare runs; export and import trajectories"
DEFAULT_ROOT = Path("runs")
"""Where ``longarc run`` makes runs; none may have been made yet."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add list, show, audit, diff, export and import."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the runs in a directory")
    listing.add_argument("root", type=Path, nargs="?", default=DEFAULT_ROOT, help="default: runs")
    show = actions.add_parser("show", help="show a run, or one trajectory of it token by token")
    show.add_argument("run_dir", type=Path, metavar="RUN")
    show.add_argument("trajectory", nargs="?", help="its id; without one, the run is summarised")
    audit = actions.add_parser(
        "audit", help="prove from the ledger that nothing was lost or used twice"
    )
    audit.add_argument("run_dir", type=Path, metavar="RUN")
    for action in (listing, show, audit):
        action.add_argument("--json", action="store_true", help="print JSON")
    diff = actions.add_parser(
        "diff", help="compare recipe, environment and last metrics of two runs"
    )
    diff.add_argument("left", type=Path, metavar="RUN_A")
    diff.add_argument("right", type=Path, metavar="RUN_B")
    _configure_exchange(actions)


def _configure_exchange(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    from longarc.records.outcome import Disposition, Outcome

    export = actions.add_parser(
        "export", help="write trajectories as ATIF documents or as JSON lines, which lose nothing"
    )
    export.add_argument("run_dir", type=Path, metavar="RUN")
    export.add_argument(
        "trajectories", nargs="*", metavar="TRAJECTORY", help="ids; without any, all are written"
    )
    export.add_argument("--format", choices=("jsonl", "atif"), default="jsonl", help="jsonl")
    export.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="a file for jsonl, a new directory for atif; by default one a line is printed",
    )
    export.add_argument("--stage", metavar="NAME", help="only trajectories of this stage")
    export.add_argument("--family", metavar="NAME", help="only those of this task family")
    export.add_argument(
        "--outcome", choices=list(map(str, Outcome)), help="only those that ended so"
    )
    export.add_argument(
        "--disposition", choices=list(map(str, Disposition)), help="only those that became this"
    )
    export.add_argument(
        "--no-prompt-ids",
        action="store_true",
        help="with --format atif: steps do not repeat their prompts, which makes long trajectories much smaller",
    )
    taken = actions.add_parser(
        "import", help="add ATIF documents or JSON lines to a run's ledger, all or none"
    )
    taken.add_argument("run_dir", type=Path, metavar="RUN")
    taken.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a .json or .jsonl file, a directory with files named like trajectories, or another run",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what the action says."""
    match arguments.action:
        case "list":
            return _list(arguments.root, as_json=arguments.json)
        case "show" if arguments.trajectory:
            return _show_trajectory(arguments)
        case "show":
            return _show_run(arguments)
        case "audit":
            return _audit(arguments)
        case "export":
            from longarc.cli._exchange import export_trajectories

            return export_trajectories(arguments)
        case "import":
            from longarc.cli._exchange import import_trajectories

            return import_trajectories(arguments)
        case _:
            return _diff(arguments)


def _list(root: Path, *, as_json: bool) -> int:
    from longarc.cli._runs import print_json, run_line, run_summary
    from longarc.runs.directory import RunDirectory, find_runs

    if root != DEFAULT_ROOT and not root.is_dir():
        raise ConfigError(f"there is no directory {root}; give the one that holds the runs")
    summaries = []
    for path in find_runs(root):
        try:
            summaries.append(run_summary(RunDirectory.look(path)))
        except LongArcError as error:
            # One damaged run hides no other.
            print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
    if as_json:
        print_json(summaries)
    elif not summaries:
        print(f"no runs in {root}")
    else:
        for summary in summaries:
            print(run_line(summary))
    return ExitCode.OK


def _show_run(arguments: argparse.Namespace) -> int:
    from longarc.cli._runs import print_json, print_summary, run_summary
    from longarc.runs.directory import RunDirectory

    summary = run_summary(RunDirectory.look(arguments.run_dir))
    if arguments.json:
        print_json(summary)
    else:
        print_summary(summary)
    return ExitCode.OK


def _show_trajectory(arguments: argparse.Namespace) -> int:
    from longarc.cli._runs import print_json
    from longarc.cli._trajectory import print_trajectory, trajectory_json
    from longarc.runs.directory import RunDirectory

    run_directory = RunDirectory.look(arguments.run_dir)
    with run_directory.read_ledger() as ledger:
        if ledger.row(arguments.trajectory) is None:
            raise ConfigError(ledger.unknown(arguments.trajectory))
        trajectory = ledger.trajectory(arguments.trajectory)
        row = ledger.row(arguments.trajectory)
        uses = ledger.uses(arguments.trajectory)
    if arguments.json:
        print_json(trajectory_json(trajectory, row, uses))
    else:
        print_trajectory(
            trajectory, row, uses, tokenizer_path=run_directory.path / "tokenizer.json"
        )
    return ExitCode.OK


def _audit(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from longarc.cli._runs import print_json
    from longarc.runs.directory import RunDirectory

    with RunDirectory.look(arguments.run_dir).read_ledger() as ledger:
        report = ledger.audit()
    if arguments.json:
        print_json({**asdict(report), "ok": report.ok})
    else:
        for finding in report.findings:
            print(f"found: {finding}")
        print(
            f"{report.num_admissions} admissions, {report.num_trajectories} trajectories, "
            f"{report.num_uses} uses in {report.num_steps} steps: "
            + ("every promise holds" if report.ok else f"{len(report.findings)} finding(s)")
        )
    return ExitCode.OK if report.ok else ExitCode.FAILED


def _recipe_changes(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Compare what both runs could be told: an option that one of them is older or newer than is no difference."""
    from longarc.config.recorded import read_recorded
    from longarc.runs.directory import recipe_changes

    try:
        read = [read_recorded(tree, source="recipe.json") for tree in (left, right)]
    except ConfigError:
        # Of a version too different to be read as one of this version: compared as they are written.
        return recipe_changes(left, right)
    shared = read[0].removed.keys() & read[1].removed.keys()
    return recipe_changes(
        *(
            {
                **recorded.recipe.model_dump(mode="json"),
                **{key: recorded.removed[key] for key in sorted(shared)},
            }
            for recorded in read
        )
    )


def _diff(arguments: argparse.Namespace) -> int:
    from longarc.cli._runs import last_metrics
    from longarc.runs.directory import RunDirectory, format_changes, recipe_changes

    left, right = RunDirectory.look(arguments.left), RunDirectory.look(arguments.right)
    environments = [({"": None}, *run.environments())[-1] for run in (left, right)]
    parts = {
        "recipe": _recipe_changes(left.recipe(), right.recipe()),
        "environment": recipe_changes(*environments),
        "last metrics": recipe_changes(last_metrics(left), last_metrics(right)),
    }
    for title, changes in parts.items():
        changes.pop("started_at_s", None)
        print(f"{title}:" if changes else f"{title}: equal")
        if changes:
            print(format_changes(changes))
    return ExitCode.OK
