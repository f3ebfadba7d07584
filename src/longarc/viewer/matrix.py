"""The evaluation matrix: success of every stage's checkpoint on every family, and what was forgotten."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from longarc.errors import ContractError, boundary
from longarc.runs.directory import RunDirectory
from longarc.viewer.numbers import short, wilson_interval
from longarc.viewer.paired import Solved, paired_difference

RESULTS = "results.json"
"""File in a stage's directory that makes it an evaluation."""

KEPT_FRAC = 0.95
"""A family counts as kept where success is at least this share of the best before."""


def read_evaluations(run: RunDirectory) -> dict[str, list[dict[str, Any]]]:
    """Return the cells of every evaluation by its name, the recipe's own first.

    Raises:
        ContractError: a file of results is damaged.
    """
    found = {}
    for name in run.stages():
        path = run.stage(name).path / RESULTS
        if path.exists():
            with boundary(ContractError, f"{path} is damaged: remove it and evaluate again"):
                found[name] = list(orjson.loads(path.read_bytes())["cells"])
    return found


def matrix(name: str, cells: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Return one evaluation as the report shows it.

    Args:
        name: what the evaluation is called.
        cells: its cells; of two for one stage and family the later counts.
        order: the recipe's stages, in which forgetting and recovery are followed.
    """
    newest = {(cell["stage"], cell["family"]): cell for cell in cells}
    known = {stage: position for position, stage in enumerate(order)}
    stages = sorted({stage for stage, _ in newest}, key=lambda s: (known.get(s, len(known)), s))
    families = sorted({family for _, family in newest})
    columns = {family: _column(family, stages, newest) for family in families}
    return {
        "name": name,
        "num_tasks": max((cell["num_tasks"] for cell in newest.values()), default=0),
        "stages": stages,
        "families": families,
        "rows": [[columns[family][stage] for family in families] for stage in stages],
        "kept": [_kept([columns[family][stage] for stage in stages]) for family in families],
        "num_excluded": sum(cell["num_excluded"] for cell in newest.values()),
        "num_rollouts": sum(cell["num_excluded"] + cell["num_graded"] for cell in newest.values()),
        "elapsed_s": sum(cell.get("elapsed_s", 0.0) for cell in newest.values()),
        "difficulty": [_difficulty(family, stages, newest) for family in families],
    }


def evaluation_headline(
    cells: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> dict[str, Any] | None:
    """Return mean success over families of the first and of the last stage; None where there is none."""
    rates: dict[str, list[float]] = {}
    whole = matrix("", cells, order)
    for stage, entries in zip(whole["stages"], whole["rows"], strict=True):
        found = [entry["rate"] for entry in entries if entry and entry["rate"] is not None]
        if found:
            rates[stage] = found
    if not rates:
        return None
    first, last = next(iter(rates)), next(reversed(rates))
    return {
        "label": "success",
        "hint": f"mean over families: weights of {first}, then of {last}",
        "first": short(sum(rates[first]) / len(rates[first])),
        "last": short(sum(rates[last]) / len(rates[last])),
        "is_share": True,
    }


def _column(
    family: str, stages: Sequence[str], cells: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, dict[str, Any] | None]:
    """Follow one family over the stages."""
    column: dict[str, dict[str, Any] | None] = {}
    best: dict[str, Any] | None = None
    is_kept = True
    for stage in stages:
        cell = cells.get((stage, family))
        if cell is None:
            column[stage] = None
            continue
        entry = _entry(cell)
        if entry["rate"] is not None:
            entry["solved"] = cell.get("solved", [])
            was_kept, is_kept = is_kept, _is_kept(entry, best)
            entry |= _against_best(entry, best, was_kept=was_kept, is_kept=is_kept)
            if best is None or entry["rate"] > best["rate"]:
                best = entry
        column[stage] = entry
    if best is not None:
        best["is_best"] = best["rate"] > 0
    for shown in column.values():
        if shown is not None:  # the page shows none of it
            shown.pop("solved", None)
    return column


def _entry(cell: Mapping[str, Any]) -> dict[str, Any]:
    solved, graded = cell["num_solved"], cell["num_graded"]
    interval = wilson_interval(solved, graded)
    return {
        "num_solved": solved,
        "num_graded": graded,
        "num_excluded": cell["num_excluded"],
        "rate": solved / graded if graded else None,
        "low": short(interval[0]) if interval else None,
        "high": short(interval[1]) if interval else None,
        "mean_reward": short(cell.get("mean_reward")),
        "mean_turns": short(cell.get("mean_turns"), digits=3),
        "mean_sampled_tokens": short(cell.get("mean_sampled_tokens"), digits=4),
        "policy_version": cell.get("policy_version"),
        "outcomes": cell.get("outcomes", {}),
        "mark": None,
        "is_best": False,
    }


def _is_kept(entry: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    return best is None or bool(entry["rate"] >= KEPT_FRAC * best["rate"])


def _against_best(
    entry: Mapping[str, Any], best: Mapping[str, Any] | None, *, was_kept: bool, is_kept: bool
) -> dict[str, Any]:
    """Return how a cell compares with the best of the stages before it."""
    if best is None:
        return {"mark": "first", "change_points": None, "is_clear": False}
    is_clear = _is_clear(entry["solved"], best["solved"])
    if is_clear is None:
        # Disjoint 95 % intervals: stricter than a test at 5 %, and it can be checked by eye.
        is_clear = entry["high"] < best["low"] or entry["low"] > best["high"]
    mark = "dropped" if not is_kept else "kept" if was_kept else "recovered"
    if is_kept and was_kept and entry["rate"] > best["rate"]:
        mark = "gained"
    change_points = 100.0 * (entry["rate"] - best["rate"])
    return {"mark": mark, "change_points": short(change_points, digits=4), "is_clear": is_clear}


def _is_clear(solved: Solved, best: Solved) -> bool | None:
    """Whether the difference on the same tasks is beyond chance; None where tasks were not kept or differ."""
    if len(solved) != len(best) or (change := paired_difference(best, solved)) is None:
        return None
    return change.is_clear


def _kept(entries: Sequence[Mapping[str, Any] | None]) -> float | None:
    """Return the last stage's success as a share of the best of any stage."""
    rates = [entry["rate"] for entry in entries if entry and entry["rate"] is not None]
    return short(rates[-1] / max(rates), digits=4) if rates and max(rates) > 0 else None


def _difficulty(
    family: str, stages: Sequence[str], cells: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return one family's success by difficulty: ``[solved, graded]`` per stage and level."""
    counts = {stage: cells.get((stage, family), {}).get("by_difficulty", {}) for stage in stages}
    levels = sorted({level for by_level in counts.values() for level in by_level}, key=float)
    rows = [[counts[stage].get(level) for level in levels] for stage in stages]
    return {"family": family, "levels": levels, "stages": list(stages), "rows": rows}
