"""Trajectories out of a run and into one, as files."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from longarc.cli._exit import ExitCode
from longarc.errors import ConfigError
from longarc.records.outcome import Disposition, Outcome
from longarc.records.trajectory import Trajectory
from longarc.runs.atif_import import STAGE
from longarc.runs.directory import RunDirectory
from longarc.runs.exchange import (
    atif_lines,
    json_lines,
    read_trajectories,
    write_atif,
    write_lines,
)
from longarc.runs.reader import LedgerReader


def export_trajectories(arguments: argparse.Namespace) -> int:
    """Write trajectories of a run, or print them one a line."""
    if arguments.no_prompt_ids and arguments.format != "atif":
        raise ConfigError("--no-prompt-ids is for --format atif; JSON lines hold each token once")
    with closing(RunDirectory.look(arguments.run_dir).read_ledger()) as ledger:
        found = _asked(ledger, arguments)
        with_prompt_ids = not arguments.no_prompt_ids
        is_atif = arguments.format == "atif"
        if arguments.out is None:
            for line in (
                atif_lines(found, with_prompt_ids=with_prompt_ids) if is_atif else json_lines(found)
            ):
                print(line)
            return ExitCode.OK
        if is_atif:
            number = write_atif(arguments.out, found, with_prompt_ids=with_prompt_ids)
        else:
            number = write_lines(arguments.out, json_lines(found))
    print(f"{number} trajectories in {arguments.out}")
    return ExitCode.OK


def import_trajectories(arguments: argparse.Namespace) -> int:
    """Add the trajectories of files to a run's ledger, all or none."""
    counts = {"trajectories": 0, "with_tokens": 0}
    with (
        RunDirectory.hold(arguments.run_dir) as run,
        closing(run.open_ledger()) as ledger,
    ):
        reason = f"imported from {', '.join(map(str, arguments.paths))}"
        ledger.collect(_renamed(arguments.paths, counts), reason=reason)
        run.event("import", paths=[str(path) for path in arguments.paths], **counts)
    print(
        f"{counts['trajectories']} trajectories added to {arguments.run_dir} as stage {STAGE}, "
        f"{counts['with_tokens']} of them with token ids"
    )
    return ExitCode.OK


def _asked(ledger: LedgerReader, arguments: argparse.Namespace) -> Iterable[Trajectory]:
    if not arguments.trajectories:
        return ledger.trajectories(
            stage=arguments.stage,
            family=arguments.family,
            outcome=arguments.outcome and Outcome(arguments.outcome),
            disposition=arguments.disposition and Disposition(arguments.disposition),
        )
    for name in ("stage", "family", "outcome", "disposition"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} chooses among all trajectories; leave it out, or the ids")
    ids = list(dict.fromkeys(arguments.trajectories))
    for trajectory_id in ids:
        if ledger.row(trajectory_id) is None:
            raise ConfigError(ledger.unknown(trajectory_id))
    return map(ledger.trajectory, ids)


def _renamed(paths: Iterable[Path], counts: dict[str, int]) -> Iterator[Trajectory]:
    """Yield what files hold under ids that no rollout of the run gets."""
    for path in paths:
        num_before = counts["trajectories"]
        for trajectory in read_trajectories(path):
            counts["trajectories"] += 1
            counts["with_tokens"] += bool(trajectory.segments)
            yield replace(
                trajectory,
                id=f"{STAGE}/{trajectory.id}",
                group_id=f"{STAGE}/{trajectory.group_id}",
                stage=STAGE,
            )
        if counts["trajectories"] == num_before:
            print(f"{path}: no trajectories", file=sys.stderr)
