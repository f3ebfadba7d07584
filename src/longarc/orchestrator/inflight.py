"""Groups between admission and training: what is known of each member, and who may be trained now."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

from longarc.orchestrator.groups import Settled, sampled_versions
from longarc.orchestrator.lag import can_wait
from longarc.orchestrator.rollout import Recall
from longarc.records.task import Task
from longarc.records.trajectory import Admission, Trajectory

_NO_TOKEN = -1


@dataclass(slots=True)
class Member:
    """One place of a group: the newest attempt to fill it, and its result."""

    admission: Admission
    recall: Recall = field(default_factory=Recall)
    started_version: int | None = None
    """Weights [optimizer steps] the engine had when the rollout started; None while it waits its turn."""
    started_at_s: float | None = None
    """Loop time of that moment [seconds]."""
    trajectory: Trajectory | None = None
    """Set once the attempt has ended and counts for the group."""
    was_stale: bool = False
    """True where an earlier attempt was cancelled as stale; that happens once."""
    _oldest_sampled: int | None = field(default=None, init=False, repr=False)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weights [optimizer steps] that sampled, or may have sampled, one of its tokens."""
        if self.trajectory is None:
            return self.started_version
        if self._oldest_sampled is None:
            # Asked at every change of any group, and a long trajectory has a million tokens.
            self._oldest_sampled = min(sampled_versions(self.trajectory), default=_NO_TOKEN)
        return None if self._oldest_sampled == _NO_TOKEN else self._oldest_sampled

    def retry_stale(self, *, policy_version: int, run_seed: int) -> Admission:
        """Return the admission of the attempt that follows a stale one, and take it for this place's."""
        self.admission = next_attempt(
            self.admission, policy_version=policy_version, run_seed=run_seed
        )
        self.recall, self.started_version, self.started_at_s = Recall(), None, None
        self.was_stale = True
        return self.admission


@dataclass(slots=True)
class InflightGroup:
    """One group from its admission until it was trained or dropped."""

    index: int
    """Position in the stage's order of admission."""
    members: tuple[Member, ...]
    settled: Settled | None = None
    """What will be trained of it; set once every member has ended."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """What has ended so far, by member."""
        return tuple(m.trajectory for m in self.members if m.trajectory is not None)

    @property
    def is_complete(self) -> bool:
        """Whether every member has ended."""
        return all(member.trajectory is not None for member in self.members)

    def last_version(self, *, trainer_version: int, max_lag_steps: int) -> int | None:
        """Return the last trainer version at which nothing of the group is stale; None = no token yet.

        Members that are stale already do not count: nothing can be done for them.
        """
        oldest = [member.oldest_version for member in self.members]
        last = [version + max_lag_steps for version in oldest if version is not None]
        return min((version for version in last if version >= trainer_version), default=None)


def new_admissions(
    task: Task, *, stage: str, group_index: int, group_size: int, policy_version: int, run_seed: int
) -> tuple[Admission, ...]:
    """Return the admissions of a new group's members."""
    group_id = f"{stage}/{group_index}"
    return tuple(
        Admission(
            trajectory_id=f"{group_id}/{member_index}/0",
            stage=stage,
            group_id=group_id,
            group_index=group_index,
            member_index=member_index,
            attempt=0,
            task=task,
            policy_version=policy_version,
            seed=_seed(run_seed, f"{group_id}/{member_index}/0"),
        )
        for member_index in range(group_size)
    )


def next_attempt(admission: Admission, *, policy_version: int, run_seed: int) -> Admission:
    """Return the admission that runs a rollout once more, with randomness of its own."""
    attempt = admission.attempt + 1
    trajectory_id = f"{admission.group_id}/{admission.member_index}/{attempt}"
    return replace(
        admission,
        trajectory_id=trajectory_id,
        attempt=attempt,
        policy_version=policy_version,
        seed=_seed(run_seed, trajectory_id),
    )


def place_id(trajectory_id: str) -> str:
    """Return what the attempts to fill one place of a group have in common."""
    return trajectory_id.rpartition("/")[0]


def choose(
    groups: Iterable[InflightGroup],
    *,
    consume: Literal["admission", "ready"],
    groups_per_step: int,
    trainer_version: int,
    max_lag_steps: int,
) -> Sequence[InflightGroup] | None:
    """Return the groups of the step at ``trainer_version``, in order; None while it has to wait.

    In admission order these are the oldest groups, and all have to be complete. In ready order they
    are the complete groups that expire first, as long as nobody left behind expires because of it.
    """
    by_index = sorted(groups, key=lambda group: group.index)
    if consume == "admission":
        chosen = by_index[:groups_per_step]
        is_full = len(chosen) == groups_per_step
        return chosen if is_full and all(group.is_complete for group in chosen) else None

    def last(group: InflightGroup) -> float:
        version = group.last_version(trainer_version=trainer_version, max_lag_steps=max_lag_steps)
        return float("inf") if version is None else version

    chosen = sorted((group for group in by_index if group.is_complete), key=last)[:groups_per_step]
    if len(chosen) < groups_per_step:
        return None
    taken = {group.index for group in chosen}
    left = [group for group in by_index if group.index not in taken]
    expiring = [int(last(group)) for group in left if last(group) != float("inf")]
    if can_wait(expiring, version=trainer_version, groups_per_step=groups_per_step):
        return chosen
    # Too many expire. Waiting helps only while one that is not complete expires before one that is.
    newest_chosen = max(map(last, chosen))
    helps = any(last(group) < newest_chosen for group in left if not group.is_complete)
    return None if helps else chosen


def _seed(run_seed: int, purpose: str) -> int:
    digest = blake2b(f"{run_seed}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
