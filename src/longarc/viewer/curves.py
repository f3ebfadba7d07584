"""Learning curves: which metrics stand in one chart, what they mean, and their values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longarc.runs.metrics import MetricRow
from longarc.viewer.numbers import short, short_list

MAX_POINTS = 400
"""Points a curve keeps; longer ones show means of neighbouring steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """One chart."""

    title: str
    unit: str
    hint: str
    """What one sees and what is healthy."""
    names: tuple[str, ...]
    """Metrics by full name; ``area/*`` takes every metric of the area, one curve each."""
    is_log: bool = False


CHARTS: tuple[ChartSpec, ...] = (
    ChartSpec(
        title="Language-model loss",
        unit="nats per token",
        hint="Surprise at the next token. Falls fast, then slowly; a jump upwards means the step was too large.",
        names=("loss/lm_nats",),
    ),
    ChartSpec(
        title="Indexer KL",
        unit="nats per token",
        hint="How far the indexer's choice of keys is from full attention. Falls towards zero.",
        names=("loss/indexer_kl_nats",),
    ),
    ChartSpec(
        title="Accept length",
        unit="tokens per step of the main model",
        hint="What a chain of drafts is worth: those accepted, and the main model's own token. Rises from one.",
        names=("mtp/accept_length_tokens",),
    ),
    ChartSpec(
        title="Acceptance of drafts",
        unit="share",
        hint="How likely a draft is accepted after all before it, by depth. Rises; later depths stay below.",
        names=("mtp/acceptance_frac/*",),
    ),
    ChartSpec(
        title="Cross-entropy of drafts",
        unit="nats per token",
        hint="Surprise of the drafts at the text, by depth. Falls; under a TV loss it may rise again.",
        names=("loss/mtp_nats/*",),
    ),
    ChartSpec(
        title="Distillation KL",
        unit="nats per token",
        hint="Distance of the student from its teachers, by family. Falls towards zero.",
        names=("distill/kl_nats", "distill/kl_nats/*"),
    ),
    ChartSpec(
        title="Success",
        unit="share of rollouts",
        hint="Share of training rollouts that were fully solved, by family. Rises; noise of a few points is normal.",
        names=("success/mean", "success/*"),
    ),
    ChartSpec(
        title="Reward",
        unit="mean per rollout",
        hint="What the graders gave, by family. Rises along with success; if only the reward rises, look for a shortcut.",
        names=("reward/mean", "reward/*"),
    ),
    ChartSpec(
        title="Policy loss",
        unit="nats per token",
        hint="The surrogate that is descended. It hovers around zero by design: it is no measure of progress.",
        names=("loss/policy",),
    ),
    ChartSpec(
        title="Entropy",
        unit="nats per token",
        hint="How undecided the policy is. Falls slowly; a collapse to zero ends exploration.",
        names=("policy/entropy_nats",),
    ),
    ChartSpec(
        title="Lag",
        unit="optimizer steps",
        hint="How old the weights were that sampled what is trained on. Flat, and below the recipe's bound.",
        names=("lag/mean_steps", "lag/max_steps"),
    ),
    ChartSpec(
        title="Engine against trainer",
        unit="|log-ratio| at lag 0, nats",
        hint="Difference of the two computations for the same weights; with vLLM or SGLang also that of the probe after an update. Tiny and flat; growth means they disagree.",
        names=(
            "mismatch/mean_abs_log_ratio",
            "mismatch/max_abs_log_ratio",
            "mismatch/k3_nats",
            "mismatch/probe_gap",
        ),
        is_log=True,
    ),
    ChartSpec(
        title="Importance ratio",
        unit="policy / behaviour policy",
        hint="Quantiles over trained tokens. Close to one; the spread grows with the lag.",
        names=("ratio/p01", "ratio/p50", "ratio/p99"),
    ),
    ChartSpec(
        title="Rejected tokens",
        unit="share of trained tokens",
        hint="Tokens whose ratio left the trusted band and carry no gradient. A few percent at most.",
        names=("loss/rejected_frac",),
    ),
    ChartSpec(
        title="Explained variance",
        unit="share of the returns' variance",
        hint="How much of what rollouts earn the critic knew before it learned from them. Rises from zero; below zero it is worse than their mean.",
        names=("critic/explained_variance",),
    ),
    ChartSpec(
        title="Returns and values",
        unit="mean over trained tokens",
        hint="What rollouts earned and what the critic expected of them. The two go together; a gap that stays means that the critic learns too slowly.",
        names=("return/mean", "critic/value_mean", "return/std"),
    ),
    ChartSpec(
        title="Value loss",
        unit="squared error",
        hint="Of the critic before its first update of a step, and before the last. Falls; it cannot fall below what is chance.",
        names=("loss/value", "loss/value_last_update"),
    ),
    ChartSpec(
        title="Values that moved too far",
        unit="share of trained tokens",
        hint="Values that left the range around where they were, and got no gradient in the last update of a step. Near one the critic is held back.",
        names=("critic/clipped_frac",),
    ),
    ChartSpec(
        title="Advantages",
        unit="over trained tokens",
        hint="Mean and spread of what the policy learns from, where a critic gives it. A spread of zero teaches nothing.",
        names=("advantage/mean", "advantage/std", "advantage/mean/*"),
    ),
    ChartSpec(
        title="Gradient norm",
        unit="before clipping",
        hint="Size of the update before clipping, of the policy and of its critic. Steady; spikes come before trouble.",
        names=("grad/norm", "grad/critic_norm"),
        is_log=True,
    ),
    ChartSpec(
        title="Tokens per second",
        unit="tokens/s",
        hint="Trained and sampled tokens per second. Flat; a fall means that something waits.",
        names=(
            "train/tokens_per_s",
            "throughput/trained_tokens_per_s",
            "throughput/sampled_tokens_per_s",
        ),
    ),
)
"""The charts everybody needs, in the order in which they are read."""


def stage_charts(rows: Sequence[MetricRow]) -> list[dict[str, Any]]:
    """Return the charts of one stage: the known ones that have values, then one for every other metric.

    Args:
        rows: the stage's metrics in the order of its steps.
    """
    rows = sorted(rows, key=lambda row: row.step)
    names = sorted({name for row in rows for name in row.values})
    taken: set[str] = set()
    charts = []
    for spec in CHARTS:
        chosen = [n for n in names if n not in taken and any(_matches(n, p) for p in spec.names)]
        # Curves come in the chart's own order; what a star takes comes by name.
        chosen.sort(key=lambda name: (_rank(name, spec.names), name))
        if not chosen:
            continue
        taken.update(chosen)
        series = [_series(rows, name, _label(name, chosen)) for name in chosen]
        charts.append(_chart(spec.title, spec.unit, spec.hint, spec.is_log, series))
    for name in names:
        if name not in taken:
            series = [_series(rows, name, name)]
            charts.append(_chart(name, "", "", False, series) | {"is_other": True})
    return charts


def _chart(
    title: str, unit: str, hint: str, is_log: bool, series: list[dict[str, Any]]
) -> dict[str, Any]:
    return {"title": title, "unit": unit, "hint": hint, "is_log": is_log, "series": series}


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("/*") else name == pattern


def _rank(name: str, patterns: Sequence[str]) -> int:
    return next(i for i, pattern in enumerate(patterns) if _matches(name, pattern))


_UNITS = ("_tokens_per_s", "_steps", "_abs_log_ratio")
"""Endings that the chart's own unit says already."""


def _label(name: str, chosen: Sequence[str]) -> str:
    """Return what tells a curve from its neighbours."""
    if len(chosen) == 1:
        return name
    if name == "train/tokens_per_s":
        return "trained, in the trainer's own time"
    last = name.rpartition("/")[2]
    for suffix in _UNITS:
        last = last.removesuffix(suffix)
    return last


def _series(rows: Sequence[MetricRow], name: str, label: str) -> dict[str, Any]:
    points = [(row.step, row.values[name]) for row in rows if name in row.values]
    stride = -(-len(points) // MAX_POINTS)
    buckets = [points[i : i + stride] for i in range(0, len(points), stride)]
    return {
        "name": label,
        "metric": name,
        "stride": stride,
        "steps": [bucket[-1][0] for bucket in buckets],
        "values": short_list(sum(v for _, v in bucket) / len(bucket) for bucket in buckets),
    }


HEADLINES: tuple[tuple[str, str], ...] = (
    ("success/mean", "success"),
    ("distill/kl_nats", "distillation KL"),
    ("loss/lm_nats", "loss"),
    ("loss/indexer_kl_nats", "indexer KL"),
    ("mtp/accept_length_tokens", "accept length"),
    ("critic/explained_variance", "explained variance"),
)
"""The metric that says best what a stage achieved, first match counts, and its name."""

_END_FRAC = 0.1
"""Share of a stage's steps whose mean stands for its beginning and its end."""


def headline(rows: Sequence[MetricRow], kind: str) -> dict[str, Any] | None:
    """Return the stage's main metric at its beginning and its end; None where it has none."""
    order = HEADLINES
    if kind == "distill":
        order = (HEADLINES[1], HEADLINES[0])
    elif kind == "value_pretrain":
        order = (HEADLINES[-1], HEADLINES[0])
    for name, label in order:
        values = [row.values[name] for row in rows if name in row.values]
        if values:
            width = max(1, int(len(values) * _END_FRAC))
            return {
                "label": label,
                "hint": f"{name}: mean of the first and of the last tenth of the steps",
                "first": short(_mean(values[:width])),
                "last": short(_mean(values[-width:])),
                "is_share": name.startswith("success/"),
            }
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def by_stage(rows: Sequence[MetricRow]) -> Mapping[str, list[MetricRow]]:
    """Return the rows of each stage, stages in order of first appearance."""
    found: dict[str, list[MetricRow]] = {}
    for row in rows:
        found.setdefault(row.stage, []).append(row)
    return found
