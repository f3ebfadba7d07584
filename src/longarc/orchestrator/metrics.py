"""What a stage reports of itself, step by step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from longarc.orchestrator.groups import Fate
from longarc.records.batch import Batch, StepReport
from longarc.records.metric import Metric
from longarc.records.sampling import EngineHealth
from longarc.records.trajectory import Group, Trajectory

SUCCESS_REWARD = 1.0
"""A rollout counts as a success from this reward on."""


@dataclass(slots=True)
class Tally:
    """What happened since the last step."""

    ended: list[Trajectory] = field(default_factory=list)
    """Rollouts that ended, however."""
    fates: dict[str, Fate] = field(default_factory=dict)
    """Members of groups that were dropped."""
    num_dropped: int = 0
    """Groups that were dropped."""

    def drop(self, fates: Mapping[str, Fate]) -> None:
        """A group was dropped with these fates."""
        self.fates.update(fates)
        self.num_dropped += 1

    def explain(self) -> str:
        """Say why groups were dropped, with the last error."""
        counts = Counter(disposition.value for disposition, _ in self.fates.values())
        reasons = ", ".join(f"{n} {name}" for name, n in counts.most_common())
        errors = [trajectory.error for trajectory in self.ended if trajectory.error]
        last = f" The last error was: {errors[-1]}." if errors else ""
        return f"Their trajectories: {reasons}.{last}"


def batch_metrics(batch: Batch, report: StepReport, *, step_s: float) -> list[Metric]:
    """Describe what was trained: lag by trajectory, tokens, turns."""
    version = batch.trainer_version
    metrics = [
        Metric("throughput/trained_tokens_per_s", report.num_trained_tokens, step_s),
        Metric("loop/trained_tokens", report.num_trained_tokens, reduce="sum"),
    ]
    for group in batch.groups:
        for trajectory in group.trajectories:
            lag = trajectory.lag(trainer_version=version)
            metrics.append(Metric("lag/mean_steps", lag))
            metrics.append(Metric("lag/max_steps", lag, reduce="max"))
    return metrics + [_repetition(group) for group in batch.groups]


def rollout_metrics(ended: Sequence[Trajectory], *, step_s: float) -> list[Metric]:
    """Describe the rollouts that ended since the last step, dropped ones included.

    Rewards are those of all graded rollouts, so that filtering groups does not change the curve.
    """
    metrics = [
        Metric("throughput/rollouts_per_s", len(ended), step_s),
        *_counts("outcome", (trajectory.outcome.value for trajectory in ended)),
    ]
    for trajectory in ended:
        metrics.append(Metric("rollout/duration_s", trajectory.duration_s))
        metrics.append(Metric("rollout/turns", trajectory.num_turns))
        metrics.append(Metric("rollout/sampled_tokens", trajectory.num_sampled_tokens))
        if trajectory.reward is not None:
            is_success = trajectory.reward >= SUCCESS_REWARD
            metrics.append(Metric("reward/mean", trajectory.reward))
            metrics.append(Metric(f"reward/{trajectory.family}", trajectory.reward))
            metrics.append(Metric("success/mean", is_success))
            metrics.append(Metric(f"success/{trajectory.family}", is_success))
    return metrics


def fate_metrics(fates: Mapping[str, Fate], *, num_trained: int, num_dropped: int) -> list[Metric]:
    """Count what was not trained, by reason; a survival of 1 means that no group was dropped."""
    return [
        *_counts("excluded", (disposition.value for disposition, _ in fates.values())),
        Metric("loop/group_survival_frac", num_trained, num_trained + num_dropped),
    ]


def engine_metrics(before: EngineHealth, after: EngineHealth, *, step_s: float) -> list[Metric]:
    """Describe what the engine did between two looks at its counters."""
    sampled = after.num_sampled_tokens - before.num_sampled_tokens
    prompted = after.num_prompt_tokens - before.num_prompt_tokens
    cached = after.num_cached_tokens - before.num_cached_tokens
    busy_s = min(max(after.busy_s - before.busy_s, 0.0), step_s)
    updates = after.num_updates - before.num_updates
    probe = [] if after.probe_gap is None else [Metric("mismatch/probe_gap", after.probe_gap)]
    return [
        *probe,
        Metric("throughput/sampled_tokens_per_s", sampled, step_s),
        Metric("engine/prefill_tokens_saved_frac", cached, prompted),
        Metric("engine/preemptions", after.num_preemptions - before.num_preemptions, reduce="sum"),
        Metric("engine/used_pages_frac", after.num_used_pages, after.num_pages),
        Metric("engine/cached_pages_frac", after.num_cached_pages, after.num_pages),
        Metric("engine/update_s", after.update_s - before.update_s, updates),
        Metric("engine/update_pause_s", after.update_pause_s - before.update_pause_s, updates),
        Metric("loop/engine_idle_frac", step_s - busy_s, step_s),
    ]


def _repetition(group: Group) -> Metric:
    size = sum(group.multiplicities)
    return Metric("loop/repeated_frac", size - len(group.trajectories), size)


def _counts(area: str, names: Iterable[str]) -> list[Metric]:
    return [Metric(f"{area}/{name}", n, reduce="sum") for name, n in sorted(Counter(names).items())]
