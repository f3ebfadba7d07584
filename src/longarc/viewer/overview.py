"""What a run is and how far it got: the report's header and its row of stages."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longarc.config.recipe import INITIAL
from longarc.errors import CheckpointError, ContractError, boundary
from longarc.runs.checkpoint import read_manifest
from longarc.runs.directory import RunDirectory
from longarc.runs.files import read_json_lines
from longarc.runs.metrics import MetricRow
from longarc.runs.reader import StepRow, TrajectoryRow
from longarc.viewer.curves import headline
from longarc.viewer.matrix import evaluation_headline

EVENTS = "events.jsonl"
_WEIGHTS = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000

_MODEL_FACTS = (
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden"),
    ("num_attention_heads", "heads"),
    ("n_routed_experts", "experts"),
    ("index_topk", "selected keys"),
    ("vocab_size", "token ids"),
)


# ---------------------------------------------------------------------------- header


def run_facts(run: RunDirectory) -> dict[str, Any]:
    """Return what the header says, except for what the stages add up to."""
    recipe, starts = run.recipe(), run.environments()
    newest: Mapping[str, Any] = starts[-1] if starts else {}
    model, num_parameters = _model(run)
    return {
        "name": str(recipe.get("name") or run.path.name),
        "seed": recipe.get("seed"),
        "num_parameters": num_parameters,
        "model_family": str(model.get("family", "")),
        "model_facts": [f"{model[key]} {label}" for key, label in _MODEL_FACTS if model.get(key)],
        "longarc": newest.get("longarc"),
        # The code that trained is the first start's; serving and evaluating later starts the run again.
        "commits": list(dict.fromkeys(str(s["git_commit"]) for s in starts if s.get("git_commit"))),
        "machine": f"{newest['num_cores']} cores" if newest.get("num_cores") else "not recorded",
        "platform": newest.get("platform"),
        "python": newest.get("python"),
        "torch": newest.get("packages", {}).get("torch"),
        "started_at_s": starts[0].get("started_at_s") if starts else None,
        "num_starts": len(starts),
        "is_running": run.running_in() is not None,
    }


def _model(run: RunDirectory) -> tuple[Mapping[str, Any], int | None]:
    """Return the newest checkpoint's model and its number of parameters, else the recipe's model."""
    for name in reversed(run.stages()):
        for checkpoint in reversed(run.stage(name).checkpoints()):
            try:
                manifest = read_manifest(checkpoint)
            except CheckpointError:
                continue
            return manifest.model, num_parameters_in(checkpoint / _WEIGHTS)
    return run.recipe().get("model") or {}, None


def num_parameters_in(path: Path) -> int | None:
    """Return the number of parameters in a safetensors file, from its header; None where it has none."""
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                return None
            header = json.loads(file.read(size))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        return sum(int(math.prod(entry["shape"])) for entry in tensors)
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError):
        # A header is decoration: weights that cannot be read are reported where they are loaded.
        return None


# ---------------------------------------------------------------------------- stages


def stage_facts(
    run: RunDirectory,
    *,
    metrics: Mapping[str, Sequence[MetricRow]],
    steps: Mapping[str, Sequence[StepRow]],
    trajectories: Mapping[str, Sequence[TrajectoryRow]],
    cells: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[dict[str, Any]]:
    """Return every stage of the recipe, then evaluations that were asked for later.

    Args:
        run: the run.
        metrics: metrics by stage.
        steps: recorded steps by stage.
        trajectories: rows of the ledger by stage.
        cells: finished cells by evaluation.
    """
    recipe_stages: Mapping[str, Mapping[str, Any]] = run.recipe().get("stages") or {}
    times = stage_times(run)
    later = [name for name in cells if name not in recipe_stages]
    facts = []
    for name in [*recipe_stages, *later]:
        config = recipe_stages.get(name, {"kind": "eval"})
        kind = str(config.get("kind", name))
        rows = metrics.get(name, ())
        elapsed_s = times.get(name, 0.0) or sum(
            c.get("elapsed_s", 0.0) for c in cells.get(name, ())
        )
        num_steps, planned = _progress(config, kind, rows, steps.get(name, ()), cells.get(name, ()))
        facts.append(
            {
                "name": name,
                "kind": kind,
                "status": _status(run, name, kind, elapsed_s, (num_steps, planned)),
                "elapsed_s": round(elapsed_s, 3),
                "num_steps": num_steps,
                "num_planned_steps": planned,
                "num_trained_tokens": _trained_tokens(rows, steps.get(name, ())),
                "num_sampled_tokens": sum(t.num_sampled_tokens for t in trajectories.get(name, ())),
                "num_trajectories": len(trajectories.get(name, ())),
                "headline": (
                    evaluation_headline(cells.get(name, ()), [INITIAL, *recipe_stages])
                    if kind == "eval"
                    else headline(rows, kind)
                ),
                "max_lag_steps": (config.get("loop") or {}).get("max_lag_steps"),
            }
        )
    return facts


def _progress(
    config: Mapping[str, Any],
    kind: str,
    rows: Sequence[MetricRow],
    steps: Sequence[StepRow],
    cells: Sequence[Mapping[str, Any]],
) -> tuple[int, int | None]:
    """Return how many steps (of an evaluation: cells) are done, and how many are planned."""
    if kind == "eval":
        num_cells = len(config.get("stages") or ()) * len(config.get("tasks") or ())
        return len(cells), num_cells or None
    planned = config.get("num_steps") or (config.get("loop") or {}).get("num_steps")
    extra = config.get("warmup_steps", 0) if kind == "dsa" else 0
    return len(steps) or len(rows), None if planned is None else int(planned) + int(extra)


def _trained_tokens(rows: Sequence[MetricRow], steps: Sequence[StepRow]) -> int:
    if steps:
        return sum(step.num_trained_tokens for step in steps)
    counts = (row.values.get("train/num_tokens", 0.0) for row in rows)
    return int(sum(count for count in counts if math.isfinite(count)))


def _status(
    run: RunDirectory, name: str, kind: str, elapsed_s: float, progress: tuple[int, int | None]
) -> str:
    num_done, planned = progress
    if kind == "eval":
        is_done = num_done > 0 and (planned is None or num_done >= planned)
    else:
        try:
            is_done = run.stage(name).final() is not None
        except CheckpointError:
            return "damaged"
    if is_done:
        return "done"
    if not (elapsed_s or num_done or run.stage(name).path.exists()):
        return "waiting"
    return "running" if run.running_in() is not None else "stopped"


def stage_times(run: RunDirectory) -> dict[str, float]:
    """Return the time spent in each stage over all starts [seconds].

    A start that was killed, or still runs, has no ``stage_ended``: it counts up to the last metric
    that it left.

    Raises:
        ContractError: ``events.jsonl`` is damaged.
    """
    path = run.path / EVENTS
    with boundary(ContractError, f"{path} is damaged: restore it from a copy"):
        events = read_json_lines(path)
    spent: dict[str, float] = {}
    # One process runs one stage at a time, so at most one start is open.
    is_open: tuple[str, float] | None = None
    for event in events:
        if event["event"] == "stage_started":
            _count_open(run, spent, is_open, until_s=event["time_s"])
            is_open = (event["stage"], event["time_s"])
        elif event["event"] == "stage_ended":
            is_open = None
            stage = str(event["stage"])
            spent[stage] = spent.get(stage, 0.0) + event["elapsed_s"]
    _count_open(run, spent, is_open, until_s=math.inf)
    return spent


def _count_open(
    run: RunDirectory, spent: dict[str, float], start: tuple[str, float] | None, *, until_s: float
) -> None:
    """Count a start that did not say when it ended."""
    if start is None:
        return
    stage, began_s = start
    # The lines as written: a step that was taken again has two, and the first one tells of this start.
    times = [r["time_s"] for r in read_json_lines(run.metrics_path) if r["stage"] == stage]
    last_s = max((time_s for time_s in times if began_s <= time_s < until_s), default=began_s)
    spent[stage] = spent.get(stage, 0.0) + last_s - began_s
