"""One engine made of many: sessions stay where their cache is, and no request dies with its engine.

::

    stream() --session--> placement --> worker A: tokens 1 2 3 .. 64 --killed--+
                                        worker B: prompt + 1 .. 64 --> 65 66 ... finish   (one stream for the caller)

The tokens that came are kept. When an engine is lost, or stops after draining, the request goes on at another
one behind the last kept token, with the same seed and the next position of its draws: what follows is what
would have followed, as long as the weights are the same; where they are not, each piece says its version.

Source: GLM-5 (arXiv:2602.15763), 4.1: rollouts routed to the same data-parallel rank by consistent
hashing, heartbeats that take failed servers out while their requests are retried elsewhere.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Self

from longarc.config.routing import RoutingConfig
from longarc.engine.fleet import Fleet
from longarc.engine.kept import KeptCompletion
from longarc.engine.seeds import seed_of_request
from longarc.engine.streams import closing
from longarc.engine.worker import Worker
from longarc.errors import (
    EngineBusyError,
    EngineError,
    EngineLostError,
    boundary,
    first_of,
)
from longarc.records.ports import Engine
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource

_log = logging.getLogger(__name__)


class Router:
    """Satisfies the `Engine` port over several engines; enter it with ``async with``."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        config: RoutingConfig,
        *,
        seed: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Prepare to route; the engines are not asked yet, and belong to whoever made them.

        Args:
            engines: by name; names decide which sessions go where, so they should outlive a restart.
            config: how to route.
            seed: seed of requests that have none.
            clock: time [seconds] of slow starts, idle sessions and breakers; None = the event loop's.

        Raises:
            ConfigError: there is no engine.
        """
        self._config = config
        self._seed = seed
        self._num_requests = 0
        clock = clock or (lambda: asyncio.get_running_loop().time())
        self._fleet = Fleet(engines, config, clock=clock)
        self._tasks = asyncio.TaskGroup()
        self._tending: list[asyncio.Task[None]] = []
        self._is_open = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tending = [
            self._tasks.create_task(self._fleet.tend(worker), name=f"tend {worker.name}")
            for worker in self._fleet.workers
        ]
        self._is_open = True
        try:
            # Or the first to answer would get all sessions of the beginning.
            await self._fleet.all_looked_at()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        for task in self._tending:
            task.cancel()
        failure: Exception | None = None
        try:
            # Not told of the block's own error, which it would wrap into a group.
            await self._tasks.__aexit__(None, None, None)
        except ExceptionGroup as group:
            failure = first_of(group)
        if failure is not None:
            raise failure

    # The Engine port -------------------------------------------------------------------------

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Sample one completion; see `longarc.records.ports.Engine`.

        Raises:
            EngineRequestError: the engines refuse the request.
            EngineBusyError: the queues of all engines are full.
            EngineLostError: it was lost ``max_resumes`` times in a row without a new token, or no engine
                took requests for ``patience_s``.
        """
        self._check_open()
        kept = KeptCompletion(
            prompt_ids, self._seeded(sampling), keep_every_tokens=self._config.keep_every_tokens
        )
        avoided: set[Worker] = set()
        num_failures = 0
        while True:
            worker = await self._fleet.place(session_id, avoided=avoided)
            num_before = kept.num_kept
            try:
                async with aclosing(self._attempt(worker, kept, session_id)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except EngineBusyError:
                avoided.add(worker)
                if avoided.issuperset(self._fleet.serving):
                    raise
            except EngineLostError as error:
                self._fleet.suspect(worker, error)
                if kept.num_kept > num_before:
                    avoided.clear()
                    num_failures = 0
                avoided.add(worker)
                num_failures += 1
                if num_failures > self._config.max_resumes:
                    raise
                _log.info(
                    "session %s goes on after %d tokens: %s", session_id, kept.num_kept, error
                )
            ending = kept.ending()
            if ending is not None:
                yield ending
                return

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats], from the engine that has least to do."""
        self._check_open()
        for _ in range(self._config.max_resumes):
            worker = await self._idlest()
            try:
                return await self._scored(worker, token_ids, temperature)
            except EngineLostError as error:
                self._fleet.suspect(worker, error)
        return await self._scored(await self._idlest(), token_ids, temperature)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Give new weights to all engines that serve; returns when each has them or is taken out.

        An engine that fails serves no more until it has taken the newest weights. Where all refuse, the
        weights are what is wrong: the old ones stay in use everywhere.

        Raises:
            WeightsRefusedError: every engine refused them.
            EngineLostError: no engine could be reached.
        """
        self._check_open()
        await self._fleet.update_weights(source, policy_version)

    async def health(self) -> EngineHealth:
        """Say how all engines are together; ready as long as one is. ``busy_s`` is their mean."""
        return await self._fleet.health()

    # Parts of them ---------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineLostError("the router is not running; enter it with `async with` first")

    def _seeded(self, sampling: Sampling) -> Sampling:
        """Fix the seed here, or another engine would draw another one for the rest."""
        self._num_requests += 1
        if sampling.seed is not None:
            return sampling
        return replace(sampling, seed=seed_of_request(self._seed, self._num_requests))

    async def _attempt(
        self, worker: Worker, kept: KeptCompletion, session_id: str
    ) -> AsyncGenerator[SampledTokens, None]:
        """Yield what one engine samples of what is left, until the end or until the engine is lost."""
        prompt_ids, sampling = kept.request()
        lifeline = worker.lifeline
        stream = worker.engine.stream(prompt_ids, sampling, session_id=session_id)
        worker.num_open += 1
        try:
            async with closing(stream):
                while True:
                    async with lifeline.hold():
                        with boundary(EngineError, f"sampling at {worker.name}"):
                            piece = await anext(stream, None)
                    if piece is None:
                        raise EngineLostError(f"{worker.name}: the stream ended before its end")
                    worker.traffic.succeeded()
                    self._fleet.touch(session_id)
                    if piece.finish_reason == "cancelled":
                        if piece.token_ids:
                            yield kept.add(replace(piece, finish_reason=None))
                        raise EngineLostError(f"{worker.name} cancelled the request")
                    yield kept.add(piece)
                    if piece.finish_reason is not None:
                        return
        finally:
            worker.num_open -= 1

    async def _idlest(self) -> Worker:
        await self._fleet.any_serving()
        return min(self._fleet.serving, key=lambda worker: worker.num_open)

    async def _scored(
        self, worker: Worker, token_ids: Sequence[int], temperature: float
    ) -> list[float]:
        async with worker.lifeline.hold():
            with boundary(EngineError, f"scoring at {worker.name}"):
                return await worker.engine.score(token_ids, temperature=temperature)
