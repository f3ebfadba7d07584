"""Writes ``report.html``: one file that needs no server, no network and no other file."""

import base64
import hashlib
import html
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

from longarc.config.recipe import INITIAL
from longarc.errors import ConfigError, ContractError, boundary
from longarc.runs.directory import RunDirectory
from longarc.runs.files import write_atomically
from longarc.runs.metrics import read_metrics
from longarc.runs.reader import LedgerReader, StepRow, TrajectoryRow
from longarc.viewer.curves import by_stage, stage_charts
from longarc.viewer.matrix import matrix, read_evaluations
from longarc.viewer.overview import run_facts, stage_facts
from longarc.viewer.samples import StageSamples, read_samples
from longarc.viewer.trajectories import Reports, TokenTexts, choose, trajectory_entry

REPORT = "report.html"
"""Name of the report in the run directory."""

NUM_TRAJECTORIES = 120
"""Trajectories in the browser, where there are as many."""

MAX_TRAJECTORY_BYTES = 6_000_000
"""Size of all trajectories in the file; fewer are chosen where they would exceed it."""


def write_report(
    run: RunDirectory, output: Path | None = None, *, num_trajectories: int = NUM_TRAJECTORIES
) -> Path:
    """Write the report of a run, finished or not, whole or not at all; return its path.

    Args:
        run: the run, open for reading.
        output: where to; ``report.html`` in the run directory by default.
        num_trajectories: how many trajectories can be opened in it [trajectories].

    Raises:
        ConfigError: ``num_trajectories`` is negative, or the place for the report is no directory.
        ContractError: something in the run directory is damaged.
        ResourceError: the disk is full or the place is not writable.
    """
    if num_trajectories < 0:
        raise ConfigError(f"{num_trajectories} trajectories cannot be shown: give 0 or more")
    path = output or run.path / REPORT
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"{path} is no place for a report: name a file in a directory that exists"
        )
    write_atomically(path, render(report_data(run, num_trajectories=num_trajectories)))
    return path


def report_data(
    run: RunDirectory,
    *,
    num_trajectories: int = NUM_TRAJECTORIES,
    max_trajectory_bytes: int = MAX_TRAJECTORY_BYTES,
) -> dict[str, Any]:
    """Return everything the report shows, as JSON values.

    Args:
        run: the run, open for reading.
        num_trajectories: how many trajectories it holds at most [trajectories].
        max_trajectory_bytes: how much they may take as JSON [bytes].

    Raises:
        ContractError: something in the run directory is damaged.
    """
    with boundary(ContractError, f"{run.metrics_path} is damaged: restore it from a copy"):
        metrics = by_stage(read_metrics(run.metrics_path))
    evaluations = read_evaluations(run)
    order = [INITIAL, *(run.recipe().get("stages") or {})]
    with ExitStack() as stack:
        ledger = stack.enter_context(run.read_ledger()) if run.ledger_path.exists() else None
        steps, rows = _steps(ledger), _rows(ledger)
        samples = {} if ledger is None else {name: read_samples(ledger, name) for name in steps}
        stages = stage_facts(
            run, metrics=metrics, steps=steps, trajectories=rows, cells=evaluations
        )
        return {
            "run": run_facts(run),
            "stages": stages,
            "curves": {
                name: charts
                for name, stage_rows in metrics.items()
                if name not in evaluations and (charts := stage_charts(stage_rows))
            },
            "evaluations": [matrix(name, cells, order) for name, cells in evaluations.items()],
            "lag": {} if ledger is None else _lags(ledger, stages, list(steps)),
            "histograms": {n: s.histograms for n, s in samples.items() if s.histograms},
            "counts": {} if ledger is None else _counts(ledger),
            "browser": _browser(run, ledger, rows, samples, num_trajectories, max_trajectory_bytes),
        }


def _steps(ledger: LedgerReader | None) -> dict[str, list[StepRow]]:
    found: dict[str, list[StepRow]] = defaultdict(list)
    for row in ledger.steps() if ledger else ():
        found[row.stage].append(row)
    return dict(found)


def _rows(ledger: LedgerReader | None) -> dict[str, list[TrajectoryRow]]:
    found: dict[str, list[TrajectoryRow]] = defaultdict(list)
    for row in ledger.rows() if ledger else ():
        found[row.stage].append(row)
    return dict(found)


def _lags(
    ledger: LedgerReader, stages: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    bounds = {stage["name"]: stage["max_lag_steps"] for stage in stages}
    return {
        name: {"max_lag_steps": bounds.get(name), "counts": list(histogram.items())}
        for name in names
        if (histogram := ledger.lag_histogram(name))
    }


def _counts(ledger: LedgerReader) -> dict[str, Any]:
    return {
        stage: {
            "outcomes": list(ledger.counts("outcome", stage=stage).items()),
            "dispositions": [
                (name or "waiting", count)
                for name, count in ledger.counts("disposition", stage=stage).items()
            ],
        }
        for stage in ledger.stages()
    }


def _browser(
    run: RunDirectory,
    ledger: LedgerReader | None,
    rows: Mapping[str, Sequence[TrajectoryRow]],
    samples: Mapping[str, StageSamples],
    limit: int,
    max_bytes: int,
) -> dict[str, Any]:
    every = [row for stage_rows in rows.values() for row in stage_rows]
    reports: Reports = {key: value for s in samples.values() for key, value in s.reports.items()}
    reported = frozenset(trajectory_id for trajectory_id, _ in reports)
    texts = TokenTexts.of(run)
    entries: dict[str, dict[str, Any]] = {}
    while ledger is not None:
        shown = choose(every, reported, limit)
        for row in shown:
            if row.id not in entries:
                entries[row.id] = trajectory_entry(ledger, row, reports, texts)
        size = sum(len(_json(entries[row.id])) for row in shown)
        if size <= max_bytes:
            entries = {row.id: entries[row.id] for row in shown}
            break
        # Fewer of every kind, instead of none of the last stages.
        limit = min(len(shown) - 1, len(shown) * max_bytes // size)
    return {
        "num_all": len(every),
        "trajectories": list(entries.values()),
        "token_texts": {str(token_id): text for token_id, text in texts.texts.items()},
        "special_ids": texts.special_ids,
    }


# -------------------------------------------------------------------------- the file


def render(data: Mapping[str, Any]) -> bytes:
    """Return the page that shows ``data``.

    The page's policy allows exactly its own script, by digest, and no connection: what stands in the
    data can neither run nor call home, even where the script had a fault.
    """
    script, style = _asset("report.js"), _asset("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(f"{data['run']['name']} - LongArc run"),
        "policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'",
        "style": style,
        "script": script,
        # In a script element only "<" can end or change it; in JSON it may be written as an escape.
        "data": _json(data).replace("<", "\\u003c"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("report.html"))
    return page.encode()


def _json(value: object) -> str:
    # ASCII only: lone surrogates, which undecodable file names become, have no UTF-8.
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _asset(name: str) -> str:
    return resources.files("longarc.viewer").joinpath("assets", name).read_text(encoding="utf-8")
