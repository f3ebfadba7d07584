"""The check between any grader and the loss: a reward is a finite number, or the grader failed."""

import math
from collections.abc import Iterator

from longarc.errors import RolloutError, boundary
from longarc.records.ports import Env, Grader, SandboxBackend, TaskFamily
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward


def finite_reward(reward: Reward, *, task_id: str) -> Reward:
    """Return ``reward`` as it is.

    Raises:
        RolloutError: its value or one of its parts is NaN or infinite; the rollout is ``grader_failed``.
    """
    named = {"reward": reward.value, **reward.parts}
    bad = {name: value for name, value in named.items() if not math.isfinite(value)}
    if bad:
        raise RolloutError(
            f"the grader of {task_id} returned {bad}; a reward is a finite number. "
            "The rollout counts as grader_failed and is kept out of the loss"
        )
    return reward


async def checked_grade(grader: Grader, task: Task, episode: EpisodeResult) -> Reward:
    """Grade an episode with any grader.

    Raises:
        RolloutError: the grader raised, or returned something that is not a finite reward.
    """
    with boundary(RolloutError, f"the grader of {task.id} failed"):
        return finite_reward(await grader.grade(task, episode), task_id=task.id)


class CheckedFamily:
    """A task family, as it is, whose grader cannot poison a batch."""

    def __init__(self, family: TaskFamily) -> None:
        self._family = family
        self.name = family.name

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield what the family yields."""
        return self._family.tasks(split, cursor=cursor)

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Open what the family opens."""
        return self._family.open(task, sandboxes=sandboxes, seed=seed)

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """Grade, or raise ``RolloutError``."""
        return await checked_grade(self._family, task, episode)
