"""A task family whose tasks a program works on, instead of the family's own agent loop."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from longarc.envs.harnesses.env import HarnessEnv
from longarc.records.message import Role
from longarc.records.ports import (
    Env,
    Harness,
    HasInspection,
    HasWorkspace,
    SandboxBackend,
    SandboxSpec,
    TaskFamily,
)
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessLimits:
    """What one rollout of a program may use."""

    max_requests: int = 64
    """Requests that are answered, side requests included."""
    timeout_s: float = 600.0
    """How long the program may take [seconds]."""
    memory_bytes: int = 4 << 30
    disk_bytes: int = 256 << 20
    num_processes: int = 256
    """Threads count as well."""
    num_open_files: int = 4096


class HarnessFamily:
    """The tasks and the grader of a family, worked on by a harness; satisfies ``TaskFamily``."""

    def __init__(
        self, family: TaskFamily, harness: Harness, limits: HarnessLimits | None = None
    ) -> None:
        self.family, self.harness = family, harness
        self.limits = limits or HarnessLimits()
        self.name, self.thinking = family.name, family.thinking

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield the family's tasks."""
        return self.family.tasks(split, cursor=cursor)

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Make the environment of one rollout."""
        family, limits = self.family, self.limits
        return HarnessEnv(
            task=task,
            prompt=prompt_of(task),
            harness=self.harness,
            sandboxes=sandboxes,
            spec=SandboxSpec(
                files=family.workspace(task) if isinstance(family, HasWorkspace) else {},
                shown=self.harness.shown,
                memory_bytes=limits.memory_bytes,
                disk_bytes=limits.disk_bytes,
                num_processes=limits.num_processes,
                num_open_files=limits.num_open_files,
                output_bytes=1 << 20,
                lifetime_s=limits.timeout_s + 60.0,
            ),
            max_requests=limits.max_requests,
            timeout_s=limits.timeout_s,
            inspect=partial(family.inspect, task) if isinstance(family, HasInspection) else None,
        )

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """Grade as the family does."""
        return await self.family.grade(task, episode)


def prompt_of(task: Task) -> str:
    """Return what the program is told: what the task says, instructions first."""
    said = [m.content for m in task.messages if m.role in (Role.SYSTEM, Role.USER)]
    return "\n\n".join(said)
