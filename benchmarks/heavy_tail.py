"""``files`` with many short trails and a few long ones, for asynchronous.py.

One hop is drawn for half of the tasks, five hops for one in twenty. Each task is one of ``files`` itself.
"""

import dataclasses
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from longarc.envs.tasks.files import Files
from longarc.envs.tasks.splits import task_indices
from longarc.records.task import Task

HOP_WEIGHTS = {1: 50, 2: 25, 3: 12, 4: 8, 5: 5}
"""How many tasks of a hundred have how many hops."""


class HeavyTailedFiles(Files):
    """The family ``files`` with another distribution of hops in both splits."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
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
