"""An event loop whose time jumps to the next timer, so that hours of waiting are tested in no time."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Every task waits and no timer is set: nothing would ever happen again."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Never waits for a clock; callbacks run in the order of their times."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and not self._stopping:
            times = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            if not times:
                raise DeadlockError("every task waits for another one")
            self._now_s = max(self._now_s, min(times))
        super()._run_once()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
