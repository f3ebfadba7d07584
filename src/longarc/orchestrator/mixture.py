"""Which task comes next: families in exact proportions, resumable from one number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from longarc.errors import ConfigError, boundary
from longarc.records.ports import TaskFamily
from longarc.records.task import Task

_LARGEST_DENOMINATOR = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyShare:
    """One task family and how much of the stage it gets."""

    family: TaskFamily
    share: float
    """Relative share of the groups; shares are normalised over the families."""


class Mixture:
    """An endless, deterministic sequence of tasks; position n is the same task in every process.

    After n tasks each family has had its share of n rounded down or up, never more or less (the
    quota method: among families below their share, the one with the largest share per task).
    """

    def __init__(
        self, families: Sequence[FamilyShare], *, split: str = "train", position: int = 0
    ) -> None:
        """Continue at ``position`` [tasks drawn so far, all families together].

        Raises:
            ConfigError: no family, a share that is not a positive number, or one name twice.
        """
        _check(families)
        self._families = tuple(item.family for item in families)
        shares = [Fraction(item.share).limit_denominator(_LARGEST_DENOMINATOR) for item in families]
        denominator = lcm(*(share.denominator for share in shares))
        self._weights = [int(share * denominator) for share in shares]
        self._split = split
        self._counts = [0] * len(families)
        self._tasks: list[Iterator[Task] | None] = [None] * len(families)
        for _ in range(position):
            self._counts[self._choose()] += 1

    @property
    def position(self) -> int:
        """Tasks drawn so far, all families together."""
        return sum(self._counts)

    def draw(self) -> Task:
        """Return the next task; a source that ends starts again from its first task.

        Raises:
            ConfigError: the source raises, is empty, or yields a task of another family or split.
        """
        index = self._choose()
        family = self._families[index]
        cursor = self._counts[index]
        with boundary(
            ConfigError, f"task family {family.name!r}, task {cursor} of {self._split!r}"
        ):
            task = self._next_of(index)
        if task.family != family.name or task.split != self._split:
            raise ConfigError(
                f"task {task.id!r} says family={task.family!r} and split={task.split!r}, but comes from "
                f"split {self._split!r} of family {family.name!r}; make the source set both to its own"
            )
        self._counts[index] += 1
        return task

    def _choose(self) -> int:
        drawn, total = self.position, sum(self._weights)
        below_share = [
            index
            for index, (count, weight) in enumerate(zip(self._counts, self._weights, strict=True))
            if count * total < weight * (drawn + 1)
        ]
        return max(
            below_share,
            key=lambda index: (Fraction(self._weights[index], self._counts[index] + 1), -index),
        )

    def _next_of(self, index: int) -> Task:
        family, cursor = self._families[index], self._counts[index]
        tasks = self._tasks[index] or family.tasks(self._split, cursor=cursor)
        task = next(tasks, None)
        if task is None:
            # The source is finite: its length, needed after a resume, is found by walking it once.
            num_tasks = sum(1 for _ in family.tasks(self._split, cursor=0))
            if num_tasks == 0:
                raise ConfigError(
                    f"task family {family.name!r} has no tasks in split {self._split!r}; "
                    f"a family in a stage needs at least one"
                )
            tasks = family.tasks(self._split, cursor=cursor % num_tasks)
            task = next(tasks)
        self._tasks[index] = tasks
        return task


def _check(families: Sequence[FamilyShare]) -> None:
    names = [item.family.name for item in families]
    if not names:
        raise ConfigError(
            "a task mixture needs at least one family, got none; add one to the stage"
        )
    if len(set(names)) != len(names):
        raise ConfigError(
            f"task families must have different names, got {names}; a trajectory is graded by the "
            f"family its task names"
        )
    for item in families:
        if not 1 / _LARGEST_DENOMINATOR <= item.share < float("inf"):
            raise ConfigError(
                f"share {item.share!r} of task family {item.family.name!r} must be a number of at least "
                f"{1 / _LARGEST_DENOMINATOR:g}; remove the family to leave it out"
            )
