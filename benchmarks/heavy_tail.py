"""``files`` with many short trails and a few long ones, for asynchronous.py.

One hop is drawn for half of the tasks, five hops for one in twenty. Each task is one of ``files`` itself.
Its commands are real and take milliseconds; ``command_wait_s`` adds the time that remote or heavy tools
would take, with a heavy tail as well.
"""

import asyncio
import dataclasses
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from longarc.envs.tasks.files import Files
from longarc.envs.tasks.splits import task_indices
from longarc.records.ports import Env, ExecResult, Sandbox, SandboxBackend, SandboxSpec
from longarc.records.task import Task

HOP_WEIGHTS = {1: 50, 2: 25, 3: 12, 4: 8, 5: 5}
"""How many tasks of a hundred have how many hops."""
WAIT_SIGMA = 1.5
"""Of the log-normal wait before a command: one in a hundred waits 33 times the median or longer."""


class HeavyTailedFiles(Files):
    """The family ``files`` with another distribution of hops in both splits.

    Args:
        command_wait_s: median of the wait before a command [seconds]; 0: none.
        settings: those of ``files``.
    """

    def __init__(self, *, command_wait_s: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self._command_wait_s = command_wait_s
        self._by_hops = {
            hops: Files(**settings | {"train_hops": (hops, hops), "test_hops": (hops, hops)})
            for hops in HOP_WEIGHTS
        }

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield tasks from ``cursor`` on; ``train`` never ends."""
        for index in task_indices(
            split, cursor=cursor, num_test_tasks=self.settings.num_test_tasks
        ):
            rng = random.Random(f"{self.settings.seed}/{split}/{index}")
            hops = rng.choices(list(HOP_WEIGHTS), weights=list(HOP_WEIGHTS.values()))[0]
            task = next(islice(self._by_hops[hops].tasks(split, cursor=index), 1))
            yield dataclasses.replace(task, id=f"{self.name}/{split}/heavy/{index}")

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Make the environment of one rollout; its waits are drawn from ``seed``."""
        if self._command_wait_s and task.split == "train":
            sandboxes = SlowSandboxes(
                sandboxes, random.Random(f"{task.id}/{seed}"), self._command_wait_s
            )
        return super().open(task, sandboxes=sandboxes, seed=seed)


@dataclasses.dataclass(frozen=True, slots=True)
class SlowSandboxes:
    """Boxes whose commands take longer than their own work."""

    backend: SandboxBackend
    rng: random.Random
    median_s: float

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a box."""
        return SlowSandbox(await self.backend.create(spec), self.rng, self.median_s)

    async def close(self) -> None:
        """Close every box that is still open."""
        await self.backend.close()


@dataclasses.dataclass(frozen=True, slots=True)
class SlowSandbox:
    """A box that waits before each command, without using a core."""

    box: Sandbox
    rng: random.Random
    median_s: float

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 10.0
    ) -> ExecResult:
        """Wait, then run one command; the wait is not part of its time limit."""
        await asyncio.sleep(self.median_s * self.rng.lognormvariate(0.0, WAIT_SIGMA))
        return await self.box.exec(argv, stdin=stdin, timeout_s=timeout_s)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file at once."""
        await self.box.write(path, data)

    async def read(self, path: str) -> bytes:
        """Read a file at once."""
        return await self.box.read(path)

    async def close(self) -> None:
        """End the box."""
        await self.box.close()
