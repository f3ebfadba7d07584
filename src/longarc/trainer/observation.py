"""What a policy step saw, token by token, and the numbers it reports."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longarc.algos.protocols import LossInputs
from longarc.algos.token_loss import TokenLoss
from longarc.records.batch import Batch, TokenReport
from longarc.records.metric import Metric
from longarc.trainer.credit import TrainItem
from longarc.trainer.packing import MicroBatch

HISTOGRAM_SIZE = 512
"""Tokens sampled, at even distances, for each histogram."""
QUANTILES = (("p01", 0.01), ("p50", 0.5), ("p99", 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step only when it is over."""

    grad_norm: float
    """Before clipping."""
    lr: float
    normaliser: float
    elapsed_s: float
    is_distillation: bool


class Observation:
    """Collects the trained tokens of one step over its micro-batches."""

    def __init__(self, items: Sequence[TrainItem], *, trainer_version: int) -> None:
        self._items = items
        self._trainer_version = trainer_version
        self._columns: dict[str, list[npt.NDArray[np.float64]]] = defaultdict(list)
        self._loss_sum = 0.0
        self._num_rejected = 0.0
        self.num_trained_tokens = 0
        self.expert_counts: Tensor | None = None
        """Tokens routed to each expert [moe_layers, experts]; None before the first micro-batch."""

    def add(
        self,
        micro_batch: MicroBatch,
        inputs: LossInputs,
        loss: TokenLoss,
        *,
        entropy: Tensor | None,
        expert_counts: Tensor,
    ) -> None:
        """Record one micro-batch; keeps numbers, not graphs."""
        sequences = micro_batch.sequence_indices.tolist()
        positions = micro_batch.positions.tolist()
        versions = [
            self._items[i].segment.policy_versions[p]
            for i, p in zip(sequences, positions, strict=True)
        ]
        columns = {
            "sequence": micro_batch.sequence_indices,
            "position": micro_batch.positions,
            "lag": self._trainer_version - torch.tensor(versions),
            "policy": inputs.policy_logprobs.detach(),
            "log_ratio": (inputs.policy_logprobs - inputs.behaviour_logprobs).detach(),
            "advantage": inputs.advantages,
        }
        if entropy is not None:
            columns["entropy"] = entropy
        for name, values in columns.items():
            self._columns[name].append(values.to(torch.float64).numpy())
        self._loss_sum += loss.loss_sum.item()
        self._num_rejected += loss.num_rejected.item()
        self.num_trained_tokens += len(sequences)
        counts = expert_counts.to(torch.float64)
        self.expert_counts = counts if self.expert_counts is None else self.expert_counts + counts

    def metrics(self, batch: Batch, facts: StepFacts) -> tuple[Metric, ...]:
        """Return everything worth plotting about the step."""
        num_tokens = self.num_trained_tokens
        lag, log_ratio = self._column("lag"), self._column("log_ratio")
        metrics = [
            Metric("loss/policy", self._loss_sum, facts.normaliser),
            Metric("loss/rejected_frac", self._num_rejected, num_tokens),
            Metric("grad/norm", facts.grad_norm),
            Metric("policy/entropy_nats", float(self._column("entropy").sum()), num_tokens),
            Metric("lag/mean_token_steps", float(lag.sum()), num_tokens),
            Metric("lag/max_token_steps", float(lag.max()), reduce="max"),
            Metric("train/lr", facts.lr),
            Metric("train/num_tokens", num_tokens, reduce="sum"),
            Metric("train/tokens_per_s", num_tokens, facts.elapsed_s),
        ]
        for label, quantile in QUANTILES:
            value = float(np.exp(np.quantile(log_ratio, quantile)))
            metrics.append(Metric(f"ratio/{label}", value * num_tokens, num_tokens))
        mismatch = np.abs(log_ratio[lag == 0])
        if len(mismatch):
            metrics += [
                Metric("mismatch/mean_abs_log_ratio", float(mismatch.sum()), len(mismatch)),
                Metric("mismatch/max_abs_log_ratio", float(mismatch.max()), reduce="max"),
            ]
        if facts.is_distillation:
            metrics += self._distillation_metrics()
        return (*metrics, *_reward_metrics(batch))

    def token_reports(self, num_segments: int) -> tuple[TokenReport, ...]:
        """Return per-token results of the first segments of the batch."""
        sequence = self._column("sequence").astype(np.int64)
        position = self._column("position").astype(np.int64)
        reports = []
        for index, item in enumerate(self._items[:num_segments]):
            own = sequence == index
            logprobs, advantages = np.zeros((2, len(item.segment.token_ids)))
            logprobs[position[own]] = self._column("policy")[own]
            advantages[position[own]] = self._column("advantage")[own]
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
        lag, log_ratio = self._column("lag"), self._column("log_ratio")
        samples = {
            "mismatch/log_ratio": _sample(log_ratio[lag == 0]),
            "ratio/log_ratio": _sample(log_ratio),
            "lag/steps": _sample(lag),
        }
        return {name: values for name, values in samples.items() if values}

    def _distillation_metrics(self) -> list[Metric]:
        """Return the sampled estimate of KL(policy || teacher) [nats per token], whole and by family."""
        gap = -self._column("advantage")
        sequence = self._column("sequence").astype(np.int64)
        families = np.array([item.trajectory.family for item in self._items])[sequence]
        metrics = [Metric("distill/kl_nats", float(gap.sum()), len(gap))]
        for family in sorted(set(families.tolist())):
            own = gap[families == family]
            metrics.append(Metric(f"distill/kl_nats/{family}", float(own.sum()), len(own)))
        return metrics

    def _column(self, name: str) -> npt.NDArray[np.float64]:
        return np.concatenate(self._columns[name]) if self._columns[name] else np.zeros(0)


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
