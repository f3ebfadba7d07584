"""From a batch of groups to weighted training items: who gets how much credit, and how much they count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from longarc.algos.protocols import AdvantageFn
from longarc.errors import ContractError
from longarc.records.batch import Batch
from longarc.records.segment import Segment
from longarc.records.trajectory import Group, Trajectory

Reduction: TypeAlias = Literal["token_mean", "sequence_mean"]
"""token_mean: every trained token counts alike (GLM-5 eq. 3); sequence_mean: every trajectory does (eq. 1)."""


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
    """Multiplicity, or multiplicity / |y|, where |y| are the trained tokens of the whole trajectory."""


def train_items(
    batch: Batch, *, reduction: Reduction, advantage_fn: AdvantageFn | None
) -> list[TrainItem]:
    """Return the segments of a batch that have trained tokens, group by group.

    A repaired group repeats members; repeated members move the group's statistics as often as they
    stand in it (pad first, then normalise) and weigh as much in the loss.

    Args:
        batch: what the step consumes.
        reduction: decides the token weights.
        advantage_fn: from the rewards of a whole group to advantages; None where a teacher or a critic gives them.

    Raises:
        ContractError: a group is malformed, a trajectory has no reward, or nothing is trained.
    """
    items = []
    for group in batch.groups:
        advantages = _group_advantages(group, advantage_fn)
        for trajectory, multiplicity, advantage in zip(
            group.trajectories, group.multiplicities, advantages, strict=True
        ):
            num_trained = trajectory.num_trained_tokens
            weight = (
                multiplicity / num_trained
                if reduction == "sequence_mean" and num_trained
                else multiplicity
            )
            items += [
                TrainItem(
                    trajectory=trajectory,
                    segment=segment,
                    advantages=np.full(len(segment.token_ids), advantage),
                    token_weight=float(weight),
                )
                for segment in trajectory.segments
                if segment.num_trained_tokens
            ]
    if not items:
        raise ContractError(
            f"batch of step {batch.step} in stage {batch.stage!r} has {len(batch.groups)} groups and no "
            f"trained token; it should have been refused before training"
        )
    return items


def _group_advantages(group: Group, advantage_fn: AdvantageFn | None) -> Sequence[float]:
    """Return one advantage per distinct member."""
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
    if advantage_fn is None:
        return [0.0] * len(group.trajectories)
    padded: list[float] = []
    first_position = []
    for trajectory, multiplicity in zip(group.trajectories, group.multiplicities, strict=True):
        if trajectory.reward is None:
            raise ContractError(
                f"trajectory {trajectory.id} has no reward; grade it before it reaches the trainer, or name "
                f"a teacher for its family"
            )
        first_position.append(len(padded))
        padded += [trajectory.reward] * multiplicity
    advantages = advantage_fn(padded).tolist()
    return [float(advantages[position]) for position in first_position]
