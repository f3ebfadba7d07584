"""Two checkpoints compared on the same tasks, which tells smaller differences apart than two rates do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from longarc.errors import ContractError
from longarc.viewer.numbers import wilson_interval

Solved: TypeAlias = Sequence[int | None]
"""Of each task in order, whether it was solved; None where it was not graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """How success on the same tasks differs."""

    num_pairs: int
    """Tasks that were graded both times."""
    num_gained: int
    """Tasks of these that were only solved the second time."""
    num_lost: int
    """Tasks of these that were only solved the first time."""
    difference: float
    """Second success rate less the first [fraction]."""
    low: float
    """Lower end of its 95 % interval [fraction]."""
    high: float
    """Upper end [fraction]."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_difference(before: Solved, after: Solved) -> PairedDifference | None:
    """Compare two success rates over the same tasks; None where no task was graded both times.

    The 95 % interval squares and adds the distances from each rate to the ends of its Wilson interval, less what the
    correlation of the two takes away. It stays inside -1 and 1, and does not shrink to a point where
    all tasks changed alike.

    Args:
        before: of each task, whether it was solved the first time.
        after: of the same tasks in the same order, whether they were solved the second time.

    Raises:
        ContractError: the two are not equally long.

    Source: Newcombe, 1998, Improved confidence intervals for the difference between binomial proportions
    based on paired data, method 10.
    """
    if len(before) != len(after):
        raise ContractError(
            f"results of {len(before)} and of {len(after)} tasks cannot be paired; both need the same tasks"
        )
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if x is not None and y is not None]
    if not pairs:
        return None
    num_gained = sum(y > x for x, y in pairs)
    num_lost = sum(x > y for x, y in pairs)
    num_both = sum(x == y == 1 for x, y in pairs)
    difference = (num_gained - num_lost) / len(pairs)
    low, high = _interval(num_both, num_lost, num_gained, len(pairs))
    return PairedDifference(
        num_pairs=len(pairs),
        num_gained=num_gained,
        num_lost=num_lost,
        difference=difference,
        low=low,
        high=high,
    )


def _interval(num_both: int, num_lost: int, num_gained: int, num: int) -> tuple[float, float]:
    first, second = num_both + num_lost, num_both + num_gained
    down_1, up_1 = _distances(first, num)
    down_2, up_2 = _distances(second, num)
    correlation = _correlation(num_both, num_lost, num_gained, num)
    difference = (second - first) / num
    below = math.sqrt(max(0.0, down_2**2 - 2 * correlation * down_2 * up_1 + up_1**2))
    above = math.sqrt(max(0.0, up_2**2 - 2 * correlation * up_2 * down_1 + down_1**2))
    return difference - below, difference + above


def _distances(num_solved: int, num: int) -> tuple[float, float]:
    """Return how far the ends of a rate's Wilson interval lie below and above it."""
    interval = wilson_interval(num_solved, num)
    assert interval is not None
    rate = num_solved / num
    return rate - interval[0], interval[1] - rate


def _correlation(num_both: int, num_lost: int, num_gained: int, num: int) -> float:
    """Return the correlation of the two results over tasks, a positive one corrected for continuity."""
    num_neither = num - num_both - num_lost - num_gained
    first, second = num_both + num_lost, num_both + num_gained
    scale = first * (num - first) * second * (num - second)
    if scale == 0:
        return 0.0
    excess = float(num_both * num_neither - num_lost * num_gained)
    if excess > 0:
        excess = max(excess - num / 2, 0.0)
    return excess / math.sqrt(scale)
