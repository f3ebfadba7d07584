"""Lag and mismatch over a whole stage, and the token reports: what steps recorded beside their metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longarc.records.batch import TokenReport
from longarc.runs.reader import LedgerReader
from longarc.viewer.numbers import evenly, short

MAX_STEPS_READ = 300
"""Steps of a stage whose reports are read, at even distances."""

MISMATCH = "mismatch/log_ratio"
RATIO = "ratio/log_ratio"

_LOWEST, _HIGHEST, _BINS_PER_DECADE = -9, 1, 2
"""Range of the histogram of |log-ratio| [powers of ten]; what lies outside counts in the outer bins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSamples:
    """What the steps of one stage recorded."""

    histograms: dict[str, dict[str, Any]]
    """By name of the quantity; see ``magnitude_histogram``."""
    reports: dict[tuple[str, int], tuple[int, TokenReport]]
    """Step and token report by trajectory and segment; of several steps the last."""
    num_steps_read: int


def read_samples(ledger: LedgerReader, stage: str) -> StageSamples:
    """Read the step reports of a stage."""
    steps = evenly([row.step for row in ledger.steps(stage)], MAX_STEPS_READ)
    values: dict[str, list[float]] = {MISMATCH: [], RATIO: []}
    reports = {}
    for step in steps:
        report = ledger.report(stage, step)
        for name, found in values.items():
            found.extend(report.histograms.get(name, ()))
        for token_report in report.token_reports:
            key = (token_report.trajectory_id, token_report.segment_order)
            reports[key] = (step, token_report)
    return StageSamples(
        histograms={name: magnitude_histogram(found) for name, found in values.items() if found},
        reports=reports,
        num_steps_read=len(steps),
    )


def magnitude_histogram(values: Sequence[float]) -> dict[str, Any]:
    """Count values by size: exact zeros, then half decades of |value| from 1e-9 to 10.

    Values that are not finite are counted apart.
    """
    num_bins = (_HIGHEST - _LOWEST) * _BINS_PER_DECADE
    counts, num_zero, num_bad, largest = [0] * num_bins, 0, 0, 0.0
    for value in values:
        size = abs(value)
        if not math.isfinite(size):
            num_bad += 1
        elif size == 0.0:
            num_zero += 1
        else:
            place = math.floor((math.log10(size) - _LOWEST) * _BINS_PER_DECADE)
            counts[min(max(place, 0), num_bins - 1)] += 1
            largest = max(largest, size)
    return {
        "num_values": len(values),
        "num_zero": num_zero,
        "num_not_finite": num_bad,
        "lowest": _LOWEST,
        "bins_per_decade": _BINS_PER_DECADE,
        "counts": counts,
        "max_abs": short(largest),
    }
