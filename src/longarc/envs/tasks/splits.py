"""Train and test by construction: which side a problem is on is a property of the problem.

A generator that merely used two seeds would sooner or later draw one problem on both sides. Here a
digest of the problem decides, and the generator draws again until the problem is on the wanted side.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, TypeVar

from longarc.errors import ConfigError

T = TypeVar("T")

TEST_ONE_IN: Final = 8
"""One problem in this many is held out."""
_MAX_DRAWS: Final = 2000


def rng_of(*parts: object) -> random.Random:
    """A generator that depends on ``parts`` alone: the same in every process and on every machine."""
    return random.Random("/".join(str(part) for part in parts))


def split_of(problem: str) -> str:
    """Say on which side a problem is: ``test`` for one in eight, ``train`` for the others."""
    digest = hashlib.sha256(problem.encode()).digest()
    return "test" if digest[0] % TEST_ONE_IN == 0 else "train"


def draw_in_split(
    draw: Callable[[random.Random], T], problem_of: Callable[[T], str], *, split: str, key: str
) -> T:
    """Draw until the problem lies in ``split``; the same ``key`` gives the same problem always.

    Raises:
        ConfigError: no draw of many did, because the settings leave too few different problems.
    """
    for attempt in range(_MAX_DRAWS):
        drawn = draw(rng_of(key, split, attempt))
        if split_of(problem_of(drawn)) == split:
            return drawn
    raise ConfigError(
        f"{key}: {_MAX_DRAWS} draws gave no {split} problem; the settings allow too few different "
        "problems, widen their ranges"
    )


def task_indices(split: str, *, cursor: int, num_test_tasks: int) -> Iterator[int]:
    """Positions of a source from ``cursor`` on: endless for ``train``, bounded for ``test``.

    Raises:
        ConfigError: the split is neither, or the cursor is negative.
    """
    if cursor < 0:
        raise ConfigError(f"task cursor {cursor} is negative; start at 0")
    match split:
        case "train":
            yield from count(cursor)
        case "test":
            yield from range(cursor, num_test_tasks)
        case _:
            raise ConfigError(f"no split {split!r}; use train or test")
