"""Metrics: values that know how to combine."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from longarc.errors import ContractError


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial observation, combined across micro-batches, ranks and workers before it is written.

    Names read ``area/quantity[_unit]``: ``loss/rejected_frac``, ``rollout/duration_s``.
    """

    name: str
    total: float
    weight: float = 1.0
    """What ``total`` is a sum over (tokens, trajectories, ...); a mean divides by it."""
    reduce: Literal["mean", "sum", "max"] = "mean"


def combine(metrics: Iterable[Metric]) -> dict[str, float]:
    """Reduce the observations of each name to one number; a weight of zero gives no number at all."""
    grouped: dict[str, list[Metric]] = {}
    for metric in metrics:
        grouped.setdefault(metric.name, []).append(metric)

    combined: dict[str, float] = {}
    for name, parts in grouped.items():
        kinds = {part.reduce for part in parts}
        if len(kinds) != 1:
            raise ContractError(
                f"metric {name!r} is reported with different reductions: {sorted(kinds)}"
            )
        weight = sum(part.weight for part in parts)
        match parts[0].reduce:
            case "sum":
                combined[name] = sum(part.total for part in parts)
            case "max":
                combined[name] = max(part.total for part in parts)
            case "mean" if weight > 0:
                combined[name] = sum(part.total for part in parts) / weight
            case "mean":
                pass
    return combined
