"""What two servers that share one engine's work have in common: one prefills, the other decodes.

A request begins at the prefill server, which computes the cache of its prompt; the decode server fetches that
cache and samples. `longarc.engine.sglang_pair` and `longarc.engine.vllm_pair` say how each engine is told so.
Neither has run against real servers.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from longarc.engine.pieces import Chunk
from longarc.engine.served import ServerCounts
from longarc.errors import first_of

P = TypeVar("P")
D = TypeVar("D")


class InFlight:
    """Counts requests from the moment they are sent, for an update that waits for the last of them.

    The servers cannot be asked for this: a request that has left the one may not have reached the other.
    """

    def __init__(self) -> None:
        self._num_requests = 0
        self._is_none = asyncio.Event()
        self._is_none.set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Count one request until the block ends."""
        self._num_requests += 1
        self._is_none.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._is_none.set()

    async def none_left(self) -> None:
        """Wait until no request is in flight."""
        await self._is_none.wait()


async def both(prefill: Coroutine[Any, Any, P], decode: Coroutine[Any, Any, D]) -> tuple[P, D]:
    """Await both; the first error wins and cancels the other, which may be waiting for what failed."""
    try:
        async with asyncio.TaskGroup() as tasks:
            prefilled = tasks.create_task(prefill)
            decoded = tasks.create_task(decode)
    except ExceptionGroup as group:
        raise first_of(group) from group
    return prefilled.result(), decoded.result()


def joint_counts(prefill: ServerCounts, decode: ServerCounts) -> ServerCounts:
    """Return the counters of both: prompts are the prefill server's, samples the decode server's.

    A request that is at both at one time counts twice among those that run or wait.
    """
    return ServerCounts(
        num_running=prefill.num_running + decode.num_running,
        num_waiting=prefill.num_waiting + decode.num_waiting,
        num_sampled_tokens=decode.num_sampled_tokens,
        num_prompt_tokens=prefill.num_prompt_tokens,
        num_cached_tokens=prefill.num_cached_tokens,
    )


def with_cached_tokens(chunk: Chunk, num_cached_tokens: int) -> Chunk:
    """Return a chunk whose ending says what the prefill server took from its cache [tokens].

    To the decode server the whole prompt is cached, because it never computes one.
    """
    if chunk.ending is None:
        return chunk
    return replace(chunk, ending=replace(chunk.ending, num_cached_tokens=num_cached_tokens))
