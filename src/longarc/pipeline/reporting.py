"""Writes the report of a run."""

from pathlib import Path

from longarc.runs.directory import RunDirectory
from longarc.viewer import report


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory; return its path.

    Raises:
        ConfigError: there is no run.
        ContractError: something in the run directory is damaged.
        ResourceError: the disk is full or the place is not writable.
    """
    return report.write_report(RunDirectory.look(run_dir))
