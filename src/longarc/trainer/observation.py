"""What a policy step saw, token by token, and the numbers it reports."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longarc.records.batch import Batch, TokenReport
from longarc.records.metric import Metric
from longarc.trainer.credit import TrainItem
from longarc.trainer.policy_objective import PolicySums

HISTOGRAM_SIZE = 512
"""Tokens sampled, at even distances, for each histogram."""
QUANTILES = (("p01", 0.01), ("p50", 0.5), ("p99", 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step only when it is over."""

    grad_norm: float
    """Before clipping."""
    lr: float
    elapsed_s: float
    is_distillation: bool
    length_penalties: tuple[float, ...] = ()
    """What each trajectory lost of its reward for its length; empty where nothing is taken off."""


class Observation:
    """The trained tokens of one step, as numbers to report."""

    def __init__(
        self, items: Sequence[TrainItem], sums: PolicySums, *, trainer_version: int
    ) -> None:
        self._items = items
        self._sums = sums
        self._document = sums.column("document").astype(np.int64)
        self._position = sums.column("position").astype(np.int64)
        versions = [
            items[i].segment.policy_versions[p]
            for i, p in zip(self._document.tolist(), self._position.tolist(), strict=True)
        ]
        self._lag = trainer_version - np.array(versions, dtype=np.float64)

    def metrics(self, batch: Batch, facts: StepFacts) -> tuple[Metric, ...]:
        """Return everything worth plotting about the step."""
        num_tokens = self._sums.num_trained_tokens
        lag, log_ratio = self._lag, self._sums.column("log_ratio")
        metrics = [
            Metric("loss/policy", self._sums.loss, self._sums.normaliser),
            Metric("loss/rejected_frac", self._sums.num_rejected, num_tokens),
            Metric("grad/norm", facts.grad_norm),
            Metric("policy/entropy_nats", float(self._sums.column("entropy").sum()), num_tokens),
            Metric("lag/mean_token_steps", float(lag.sum()), num_tokens),
            Metric("lag/max_token_steps", float(lag.max()), reduce="max"),
            Metric("train/lr", facts.lr),
            Metric("train/num_tokens", num_tokens, reduce="sum"),
            Metric("train/tokens_per_s", num_tokens, facts.elapsed_s),
        ]
        for label, quantile in QUANTILES:
            value = float(np.exp(np.quantile(log_ratio, quantile)))
            metrics.append(Metric(f"ratio/{label}", value * num_tokens, num_tokens))
        fresh = log_ratio[lag == 0]
        if len(fresh):
            mismatch = np.abs(fresh)
            # Schulman's k3, http://joschu.net/blog/kl-approx.html: an estimate of KL(engine || trainer) that is never
            # negative. Bounded, because a broken engine would make it overflow.
            bounded = np.minimum(fresh, 20.0)
            divergence = float((np.expm1(bounded) - bounded).sum())
            metrics += [
                Metric("mismatch/mean_abs_log_ratio", float(mismatch.sum()), len(mismatch)),
                Metric("mismatch/max_abs_log_ratio", float(mismatch.max()), reduce="max"),
                Metric("mismatch/k3_nats", divergence, len(fresh)),
            ]
        if facts.is_distillation:
            metrics += self._distillation_metrics()
        if facts.length_penalties:
            penalties = facts.length_penalties
            metrics.append(Metric("train/length_penalty", sum(penalties), len(penalties)))
        return (*metrics, *_reward_metrics(batch))

    def token_reports(self, num_segments: int) -> tuple[TokenReport, ...]:
        """Return per-token results of the first segments of the batch."""
        policy, advantage = self._sums.column("policy"), self._sums.column("advantage")
        reports = []
        for index, item in enumerate(self._items[:num_segments]):
            own = self._document == index
            logprobs, advantages = np.zeros((2, len(item.segment.token_ids)))
            logprobs[self._position[own]] = policy[own]
            advantages[self._position[own]] = advantage[own]
            reports.append(
                TokenReport(
                    trajectory_id=item.trajectory.id,
                    segment_order=item.segment.order,
                    policy_logprobs=tuple(logprobs.tolist()),
                    advantages=tuple(advantages.tolist()),
                )
            )
        return tuple(reports)

    def histograms(self) -> dict[str, tuple[float, ...]]:
        """Return samples of log-ratios at lag 0 (engine against trainer), all log-ratios and lags."""
        lag, log_ratio = self._lag, self._sums.column("log_ratio")
        samples = {
            "mismatch/log_ratio": _sample(log_ratio[lag == 0]),
            "ratio/log_ratio": _sample(log_ratio),
            "lag/steps": _sample(lag),
        }
        return {name: values for name, values in samples.items() if values}

    def _distillation_metrics(self) -> list[Metric]:
        """Return the sampled estimate of KL(policy || teacher) [nats per token], whole and by family."""
        gap = -self._sums.column("advantage")
        families = np.array([item.trajectory.family for item in self._items])[self._document]
        metrics = [Metric("distill/kl_nats", float(gap.sum()), len(gap))]
        for family in sorted(set(families.tolist())):
            own = gap[families == family]
            metrics.append(Metric(f"distill/kl_nats/{family}", float(own.sum()), len(own)))
        return metrics


def _reward_metrics(batch: Batch) -> list[Metric]:
    """Return the mean reward of each family over distinct trajectories."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in batch.groups:
        for trajectory in group.trajectories:
            if trajectory.reward is not None:
                rewards[trajectory.family].append(trajectory.reward)
    return [
        Metric(f"train/reward/{family}", sum(values), len(values))
        for family, values in sorted(rewards.items())
    ]


def _sample(values: npt.NDArray[np.float64]) -> tuple[float, ...]:
    stride = max(1, -(-len(values) // HISTOGRAM_SIZE))
    return tuple(values[::stride].tolist())
