"""From finished rollouts to a group that can be trained, or to the reason why it cannot."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean

from longarc.algos.filters import (
    is_in_difficulty_window,
    is_stale,
    is_zero_variance,
    repair_group,
)
from longarc.records.outcome import Disposition, OutcomeFamily
from longarc.records.trajectory import Group, Trajectory

Fate = tuple[Disposition, str | None]
"""What became of a trajectory, and why in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A complete group, decided: ``group`` is trained, ``fates`` says what becomes of everybody else."""

    group: Group | None
    """None where nothing of the group is trained."""
    fates: Mapping[str, Fate]
    """By trajectory id: the members that are not trained. All members, where ``group`` is None."""


def sampled_versions(trajectory: Trajectory) -> set[int]:
    """Return every weight version [optimizer steps] that sampled a token of the trajectory."""
    versions: set[int] = set()
    for segment in trajectory.segments:
        versions.update(compress(segment.policy_versions, segment.is_sampled))
    return versions


def settle(
    members: Sequence[Trajectory],
    *,
    dynamic_sampling: bool,
    trainer_version: int,
    max_lag_steps: int,
    min_mean_reward: float | None = None,
    max_mean_reward: float | None = None,
) -> Settled:
    """Decide what of a complete group is trained by a step that starts at ``trainer_version``.

    Members that failed through their environment, were cancelled, or are stale are excluded. With
    more than half of the group left, the others are repeated round-robin to the size of the group;
    otherwise the group is dropped. With ``dynamic_sampling`` a group whose rewards are all alike is
    dropped as well, and so is one whose mean reward is below or above what is wanted.

    Source: GLM-5 (arXiv:2602.15763), section 4.1.2 (staleness, crashes, group rule), section 3.2 (difficulty).
    """
    fates: dict[str, Fate] = {}
    for member in members:
        fate = _exclusion(member, trainer_version=trainer_version, max_lag_steps=max_lag_steps)
        if fate is not None:
            fates[member.id] = fate
    valid = [index for index, member in enumerate(members) if member.id not in fates]

    repaired = repair_group(valid, group_size=len(members))
    if repaired is None:
        reason = f"{len(valid)} of {len(members)} members valid"
        return _dropped(members, fates, (Disposition.GROUP_DROPPED, reason))
    if not any(members[index].num_trained_tokens for index in valid):
        return _dropped(members, fates, (Disposition.GROUP_DROPPED, "no token to train"))
    if dynamic_sampling and is_zero_variance(_rewards(members[index] for index in valid)):
        return _dropped(members, fates, (Disposition.ZERO_VARIANCE, None))
    low = -math.inf if min_mean_reward is None else min_mean_reward
    high = math.inf if max_mean_reward is None else max_mean_reward
    rewards = _rewards(members[index] for index in valid)
    if rewards and not is_in_difficulty_window(rewards, low=low, high=high):
        reason = f"difficulty: mean reward {fmean(rewards):g} is not from {low:g} to {high:g}"
        return _dropped(members, fates, (Disposition.FILTERED, reason))

    counts = Counter(repaired)
    first = members[0]
    group = Group(
        id=first.group_id,
        task_id=first.task_id,
        family=first.family,
        trajectories=tuple(members[index] for index in valid),
        multiplicities=tuple(counts[index] for index in valid),
    )
    return Settled(group=group, fates=fates)


def _exclusion(member: Trajectory, *, trainer_version: int, max_lag_steps: int) -> Fate | None:
    match member.outcome.family:
        case OutcomeFamily.ENVIRONMENT:
            return Disposition.ENVIRONMENT_FAULT, member.outcome.value
        case OutcomeFamily.CONTROL:
            return Disposition.CANCELLED, member.outcome.value
        case OutcomeFamily.POLICY:
            versions = tuple(sampled_versions(member))
            if is_stale(versions, current_version=trainer_version, max_lag_steps=max_lag_steps):
                lag = trainer_version - min(versions)
                return Disposition.STALE, f"lag {lag} > {max_lag_steps}"
    return None


def _dropped(members: Sequence[Trajectory], fates: Mapping[str, Fate], rest: Fate) -> Settled:
    everybody = {member.id: fates.get(member.id, rest) for member in members}
    return Settled(group=None, fates=everybody)


def _rewards(members: Iterable[Trajectory]) -> list[float]:
    return [member.reward for member in members if member.reward is not None]
