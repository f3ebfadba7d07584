"""What a run looks like in one line, on one page and as JSON."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from longarc.errors import CheckpointError
from longarc.runs.directory import RunDirectory
from longarc.runs.metrics import read_metrics
from longarc.runs.reader import LedgerReader
from longarc.viewer.matrix import read_evaluations

_SHOWN_METRICS = 12


def print_json(value: object) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2, default=str))


def last_metrics(run: RunDirectory) -> dict[str, dict[str, float]]:
    """Return the newest value of every metric of every stage."""
    newest: dict[str, dict[str, float]] = {}
    for row in read_metrics(run.metrics_path):
        newest.setdefault(row.stage, {}).update(row.values)
    return newest


def run_summary(run: RunDirectory) -> dict[str, Any]:
    """Return what there is to say about a run, as JSON."""
    recipe = run.recipe()
    environments = run.environments()
    metrics = last_metrics(run)
    planned = list(recipe.get("stages", {}))
    names = list(dict.fromkeys([*planned, *run.stages(), *metrics]))
    summary: dict[str, Any] = {
        "path": str(run.path),
        "name": recipe.get("name"),
        "seed": recipe.get("seed"),
        "running_in": run.running_in(),
        "num_starts": len(environments),
        "git_commit": environments[-1].get("git_commit") if environments else None,
        "stages": {name: _stage_files(run, name) for name in names},
    }
    for name, cells in read_evaluations(run).items():
        stage = recipe.get("stages", {}).get(name, {})
        if stage.get("kind") == "eval" and _is_filled(cells, stage):
            summary["stages"][name]["state"] = "done"
    for name in names:
        summary["stages"][name]["metrics"] = metrics.get(name, {})
    if run.ledger_path.exists():
        with run.read_ledger() as ledger:
            summary["stages"] |= _with_ledger(ledger, summary["stages"])
    for name, stage in summary["stages"].items():
        stage["is_in_recipe"] = name in planned
    return summary


def _stage_files(run: RunDirectory, name: str) -> dict[str, Any]:
    stage = run.stage(name)
    checkpoints = stage.checkpoints()
    try:
        final = stage.final()
    except CheckpointError as error:
        return {"state": f"damaged: {error}", "checkpoints": [c.name for c in checkpoints]}
    state = "done" if final else ("started" if stage.path.exists() else "waiting")
    return {"state": state, "checkpoints": [c.name for c in checkpoints]}


def _is_filled(cells: Iterable[Mapping[str, Any]], stage: Mapping[str, Any]) -> bool:
    """Say whether an eval stage, which leaves no checkpoint, has every result that its recipe asks for."""
    asked = {(trained, family) for trained in stage["stages"] for family in stage["tasks"]}
    size = stage["tasks_per_family"]
    return asked <= {(c["stage"], c["family"]) for c in cells if c["num_tasks"] == size}


def _with_ledger(ledger: LedgerReader, stages: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(stages)
    for name in ledger.stages():
        found[name] = {
            "state": "started",
            **found.get(name, {}),
            "num_steps": len(ledger.steps(name)),
            "outcomes": ledger.counts("outcome", stage=name),
            "dispositions": {
                k or "waiting": n for k, n in ledger.counts("disposition", stage=name).items()
            },
            "lag_steps": ledger.lag_histogram(name),
        }
    return found


def run_line(summary: Mapping[str, Any]) -> str:
    """Return a run in one line; what is no stage of its recipe, as imported weights and chats are, does not count."""
    states = {
        name: stage["state"] for name, stage in summary["stages"].items() if stage["is_in_recipe"]
    }
    done = list(states.values()).count("done")
    current = [name for name, state in states.items() if state == "started"]
    where = f", in {current[-1]}" if current else ""
    if summary["running_in"]:
        where += f", running as process {summary['running_in']}"
    return f"{summary['path']}: {summary['name']}, {done} of {len(states)} stages done{where}"


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print a run on one page."""
    print(f"{summary['path']}: {summary['name']}, seed {summary['seed']}")
    print(f"started {summary['num_starts']} time(s), code {summary['git_commit'] or 'without git'}")
    if summary["running_in"]:
        print(f"running as process {summary['running_in']}")
    for name, stage in summary["stages"].items():
        last = stage.get("checkpoints", [])[-1:]
        print(f"\n{name}: {stage['state']}" + (f", newest checkpoint {last[0]}" if last else ""))
        if "num_steps" in stage:
            print(f"  {stage['num_steps']} recorded steps")
        for key in ("outcomes", "dispositions", "lag_steps"):
            if stage.get(key):
                print(f"  {key}: " + ", ".join(f"{k} {n}" for k, n in stage[key].items()))
        for metric, value in list(stage.get("metrics", {}).items())[:_SHOWN_METRICS]:
            print(f"  {metric} = {value:.6g}")
