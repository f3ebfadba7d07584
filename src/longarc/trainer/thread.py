"""The thread in which a trainer works while its event loop goes on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from longarc.models.threads import set_compute_threads

P = ParamSpec("P")
R = TypeVar("R")


class TrainerThread:
    """Runs one piece of work after the other, with as many compute threads as the thread that made it.

    One thread and not a lock: a caller that is cancelled leaves its step running, and whoever saves next must still
    wait for it.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="trainer",
            initializer=set_compute_threads,
            initargs=(torch.get_num_threads(),),
        )

    async def run(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Wait for a piece of work."""
        call = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
