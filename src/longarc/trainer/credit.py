"""From a batch of groups to weighted training items: who gets how much credit, and how much they count."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from longarc.algos.protocols import AdvantageFn
from longarc.algos.reductions import Reduction, token_weights
from longarc.algos.reinforce_plus_plus import batch_normalised
from longarc.algos.shaping import overlong_penalty
from longarc.config.rollout import OverlongConfig
from longarc.errors import ContractError
from longarc.records.batch import Batch
from longarc.records.segment import Segment
from longarc.records.trajectory import Group, Trajectory
from longarc.trainer.baselines import RunningBaselines

Column: TypeAlias = npt.NDArray[np.float64]
"""One number per token of a segment."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainItem:
    """One segment with everything the loss needs beside its tokens."""

    trajectory: Trajectory
    segment: Segment
    advantages: Column
    """Of every token of the segment, read where it is trained; 0 where a teacher or a critic gives them instead."""
    token_weight: float
    """Of every trained token, in sum and normaliser; see :func:`longarc.algos.reductions.token_weights`."""


def train_items(
    batch: Batch,
    *,
    reduction: Reduction,
    advantage_fn: AdvantageFn | RunningBaselines | None,
    normalises_batch: bool = False,
    overlong: OverlongConfig | None = None,
) -> list[TrainItem]:
    """Return the segments of a batch that have trained tokens, group by group.

    A repaired group repeats members; repeated members move the group's statistics as often as they
    stand in it (pad first, then normalise) and weigh as much in the loss.

    Args:
        batch: what the step consumes; all of it, whatever processes will share its gradients.
        reduction: decides the token weights.
        advantage_fn: from the rewards of a whole group to advantages; None where a teacher or a critic gives them.
        normalises_batch: whether the advantages are then normalised over all trained tokens of the batch.
        overlong: what long trajectories lose of their reward; None for nothing.

    Raises:
        ContractError: a group is malformed, a trajectory has no reward, or nothing is trained.
    """
    advantages = _advantages(batch.groups, advantage_fn, overlong)
    if normalises_batch:
        advantages = _normalised(batch.groups, advantages)
    items = []
    for group, its_advantages in zip(batch.groups, advantages, strict=True):
        weights = token_weights(
            [[s.num_trained_tokens for s in t.segments] for t in group.trajectories],
            group.multiplicities,
            reduction=reduction,
        )
        for trajectory, advantage, its_weights in zip(
            group.trajectories, its_advantages, weights, strict=True
        ):
            items += [
                TrainItem(
                    trajectory=trajectory,
                    segment=segment,
                    advantages=np.full(len(segment.token_ids), advantage),
                    token_weight=weight,
                )
                for segment, weight in zip(trajectory.segments, its_weights, strict=True)
                if segment.num_trained_tokens
            ]
    if not items:
        raise ContractError(
            f"batch of step {batch.step} in stage {batch.stage!r} has {len(batch.groups)} groups and no "
            f"trained token; it should have been refused before training"
        )
    return items


def length_penalty(trajectory: Trajectory, overlong: OverlongConfig) -> float:
    """Return what a trajectory loses of its reward for its length, from -1 to 0."""
    return overlong_penalty(
        trajectory.num_trained_tokens,
        max_tokens=overlong.max_tokens,
        cache_tokens=overlong.cache_tokens,
    )


def length_penalties(batch: Batch, overlong: OverlongConfig | None) -> dict[str, float]:
    """Return what each distinct trajectory loses of its reward, by its id; empty where nothing is taken off."""
    if overlong is None:
        return {}
    return {
        trajectory.id: length_penalty(trajectory, overlong)
        for group in batch.groups
        for trajectory in group.trajectories
    }


def _normalised(groups: Sequence[Group], advantages: Sequence[list[float]]) -> list[list[float]]:
    """Normalise over the trained tokens of the batch, repeated members as often as they stand in it."""
    num_tokens = [
        multiplicity * trajectory.num_trained_tokens
        for group in groups
        for trajectory, multiplicity in zip(group.trajectories, group.multiplicities, strict=True)
    ]
    values = torch.tensor([value for own in advantages for value in own], dtype=torch.float64)
    flat = iter(batch_normalised(values, torch.tensor(num_tokens, dtype=torch.float64)).tolist())
    return [[next(flat) for _ in own] for own in advantages]


def _advantages(
    groups: Sequence[Group],
    advantage_fn: AdvantageFn | RunningBaselines | None,
    overlong: OverlongConfig | None,
) -> list[list[float]]:
    """Return one advantage per distinct member of each group."""
    for group in groups:
        _check_group(group)
    if advantage_fn is None:
        return [[0.0] * len(group.trajectories) for group in groups]
    rewards = [_padded_rewards(group, overlong) for group in groups]
    if isinstance(advantage_fn, RunningBaselines):
        padded = advantage_fn.advantages([group.family for group in groups], rewards)
    else:
        padded = [advantage_fn(own).tolist() for own in rewards]
    return [
        [float(values[position]) for position in accumulate(group.multiplicities[:-1], initial=0)]
        for group, values in zip(groups, padded, strict=True)
    ]


def _check_group(group: Group) -> None:
    if (
        len(group.trajectories) != len(group.multiplicities)
        or min(group.multiplicities, default=0) < 1
    ):
        raise ContractError(
            f"group {group.id} has {len(group.trajectories)} trajectories and multiplicities "
            f"{group.multiplicities}; it needs one multiplicity of at least 1 for each trajectory"
        )
    for trajectory in group.trajectories:
        if not trajectory.outcome.is_trainable:
            raise ContractError(
                f"trajectory {trajectory.id} ended as {trajectory.outcome}, which is not the policy's doing; it "
                f"must be excluded before it reaches the trainer"
            )


def _padded_rewards(group: Group, overlong: OverlongConfig | None) -> list[float]:
    """Return what the members earned, each as often as it stands in the group."""
    padded: list[float] = []
    for trajectory, multiplicity in zip(group.trajectories, group.multiplicities, strict=True):
        if trajectory.reward is None:
            raise ContractError(
                f"trajectory {trajectory.id} has no reward; grade it before it reaches the trainer, or name "
                f"a teacher for its family"
            )
        penalty = 0.0 if overlong is None else length_penalty(trajectory, overlong)
        padded += [trajectory.reward + penalty] * multiplicity
    return padded
