"""Write the report of a run, finished or not: one HTML file that needs no server and no network.

It shows the stages, learning curves, the evaluation matrix, lag, mismatch and a choice of
trajectories token by token. A finished run has one already: RUN/report.html.
"""

import argparse
from pathlib import Path

from longarc.cli._exit import ExitCode

SUMMARY = "write the report of a run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument(
        "--output", type=Path, metavar="F", help="where to write; RUN/report.html by default"
    )
    parser.add_argument(
        "--open-trajectories",
        type=int,
        metavar="N",
        help="how many trajectories can be opened token by token; 120 by default",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write it and say where it is."""
    from longarc.runs.directory import RunDirectory
    from longarc.viewer.report import NUM_TRAJECTORIES, write_report

    wanted = arguments.open_trajectories
    path = write_report(
        RunDirectory.look(arguments.run_dir),
        arguments.output,
        num_trajectories=NUM_TRAJECTORIES if wanted is None else wanted,
    )
    print(path)
    return ExitCode.OK
