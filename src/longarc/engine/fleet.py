"""The engines behind the router: who is well, who has the current weights, who serves which session.

::

    tend(worker), one task each:   heartbeat --no answer--> SUSPECT --again and again--> LOST (what runs is cut off)
                                       | answer                        lost request --> SUSPECT, looked at at once
                                       +-- not ready --> DRAINING
                                       +-- has not the current weights --> update_weights --> SERVING, or STALE
                                       +-- else SERVING

A task consumes the ticks of its worker's heartbeat and suspicions, produces states, waits for ``worker.wake``
with a timeout, and is unblocked by ``suspect``. Requests wait for ``_changed``, which any change of state sets.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from longarc.config.routing import RoutingConfig
from longarc.engine.placement import Placement
from longarc.engine.worker import Worker, WorkerState
from longarc.errors import (
    ConfigError,
    EngineError,
    EngineLostError,
    LongArcError,
    WeightsRefusedError,
    boundary,
)
from longarc.records.ports import Engine
from longarc.records.sampling import EngineHealth, WeightSource

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Weights:
    source: WeightSource
    version: int


class Fleet:
    """All engines of one router."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        config: RoutingConfig,
        *,
        clock: Callable[[], float],
    ) -> None:
        """Prepare to look after engines.

        Raises:
            ConfigError: there is none.
        """
        if not engines:
            raise ConfigError("a router needs at least one engine")
        self.workers = [Worker(name, engine, config, clock) for name, engine in engines.items()]
        self._config = config
        self._placement: Placement[Worker] = Placement(
            load_factor=config.load_factor,
            idle_s=config.session_idle_s,
            clock=clock,
            weight=lambda worker: worker.weight,
        )
        self._weights: _Weights | None = None
        self._updating = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def serving(self) -> Collection[Worker]:
        """Engines that take requests."""
        return self._placement.places

    # Requests --------------------------------------------------------------------------------

    async def place(self, session_id: str, *, avoided: Collection[Worker]) -> Worker:
        """Return the engine that serves a session; one of ``avoided`` only where no other can.

        Raises:
            EngineLostError: none could for ``patience_s``.
        """
        while True:
            worker = self._placement.place(session_id, excluded=avoided)
            worker = worker or self._placement.place(session_id)
            if worker is not None:
                return worker
            await self.any_serving()

    async def all_looked_at(self) -> None:
        """Wait until each engine was asked once how it is, whatever it said."""
        for worker in self.workers:
            await worker.looked_at.wait()

    async def any_serving(self) -> None:
        """Wait until an engine takes requests.

        Raises:
            EngineLostError: none did for ``patience_s``.
        """
        try:
            async with asyncio.timeout(self._config.patience_s):
                while not self.serving:
                    await self._changed.wait()
        except TimeoutError as error:
            states = ", ".join(f"{worker.name} is {worker.state}" for worker in self.workers)
            raise EngineLostError(
                f"no engine took requests for {self._config.patience_s:g} s: {states}. Start a server again and resume, or "
                f"raise engine.routing.patience_s"
            ) from error

    def touch(self, session_id: str) -> None:
        """A session is being sampled: it counts as live however long that takes."""
        self._placement.touch(session_id)

    def suspect(self, worker: Worker, error: LongArcError) -> None:
        """A request was lost on an engine: look at it before anything else is sent there."""
        if worker.state is WorkerState.SERVING:
            worker.traffic.failed()
            self._leave(worker, WorkerState.SUSPECT, str(error))

    # Weights ---------------------------------------------------------------------------------

    async def update_weights(self, source: WeightSource, policy_version: int) -> None:
        """Give new weights to all engines that serve; see `Router.update_weights`."""
        await self.any_serving()
        async with self._updating:
            weights = _Weights(source, policy_version)
            asked = list(self.serving)
            async with asyncio.TaskGroup() as tasks:
                pushes = {
                    worker: tasks.create_task(self._push(worker, weights)) for worker in asked
                }
            errors = {worker: push.result() for worker, push in pushes.items() if push.result()}
            if len(errors) == len(asked):
                raise self._not_updated(errors, policy_version)
            self._weights = weights
            for worker, error in errors.items():
                lost = isinstance(error, EngineLostError)
                self._leave(worker, WorkerState.SUSPECT if lost else WorkerState.STALE, str(error))
            for worker in list(self.serving):
                # It came back meanwhile, and was given those of before.
                if worker.taken is None or worker.taken[1] != policy_version:
                    self._leave(worker, WorkerState.JOINING, "newer weights came")

    def _not_updated(
        self, errors: Mapping[Worker, LongArcError | None], version: int
    ) -> LongArcError:
        """Return why no engine has new weights; those that did not answer are looked at."""
        for worker, error in errors.items():
            if isinstance(error, EngineLostError):
                self.suspect(worker, error)
        found = [error for error in errors.values() if error is not None]
        refusals = [error for error in found if isinstance(error, WeightsRefusedError)]
        return next(iter(refusals or found), EngineLostError(f"nobody took weights {version}"))

    async def _push(self, worker: Worker, weights: _Weights) -> LongArcError | None:
        """Give weights to one engine; return what went wrong."""
        try:
            async with worker.lifeline.hold(), asyncio.timeout(self._config.update_timeout_s):
                with boundary(EngineError, f"updating {worker.name}"):
                    await worker.engine.update_weights(
                        weights.source, policy_version=weights.version
                    )
        except TimeoutError:
            return EngineLostError(
                f"{worker.name} did not take weights {weights.version} within "
                f"{self._config.update_timeout_s:g} s"
            )
        except LongArcError as error:
            return error
        health = worker.health
        worker.taken = ("" if health is None else health.instance_id, weights.version)
        return None

    # Health ----------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Return the sum of what the engines say of themselves, asking those that serve once more."""
        async with asyncio.TaskGroup() as asks:
            for worker in self.serving:
                asks.create_task(self._ask(worker))
        found = [worker.health for worker in self.workers if worker.health is not None]
        serving = [worker.health for worker in self.serving if worker.health is not None]
        if self._weights is not None:
            version = self._weights.version
        else:
            version = min((health.policy_version for health in serving), default=0)
        return EngineHealth(
            is_ready=bool(serving),
            policy_version=version,
            num_running=sum(health.num_running for health in serving),
            num_waiting=sum(health.num_waiting for health in serving),
            num_sampled_tokens=sum(health.num_sampled_tokens for health in found),
            num_prompt_tokens=sum(health.num_prompt_tokens for health in found),
            num_cached_tokens=sum(health.num_cached_tokens for health in found),
            num_recomputed_tokens=sum(health.num_recomputed_tokens for health in found),
            num_preemptions=sum(health.num_preemptions for health in found),
            num_updates=sum(health.num_updates for health in found),
            update_s=sum(health.update_s for health in found),
            update_pause_s=sum(health.update_pause_s for health in found),
            max_update_pause_s=max((health.max_update_pause_s for health in found), default=0.0),
            num_free_pages=sum(health.num_free_pages for health in serving),
            num_cached_pages=sum(health.num_cached_pages for health in serving),
            num_used_pages=sum(health.num_used_pages for health in serving),
            busy_s=sum(health.busy_s for health in found) / len(self.workers),
        )

    async def tend(self, worker: Worker) -> None:
        """Look after one engine for ever."""
        while True:
            worker.wake.clear()
            await self._look_at(worker)
            worker.looked_at.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(worker.pause_s):
                    await worker.wake.wait()

    async def _ask(self, worker: Worker) -> LongArcError | None:
        """Note an engine's health; return why there is none."""
        try:
            async with asyncio.timeout(self._config.heartbeat_timeout_s):
                with boundary(EngineError, f"asking {worker.name} for its health"):
                    worker.note(await worker.engine.health())
        except TimeoutError:
            return EngineLostError(
                f"no answer to a heartbeat within {self._config.heartbeat_timeout_s:g} s"
            )
        except LongArcError as error:
            return error
        if not self._has_current_weights(worker):
            self._leave(worker, WorkerState.JOINING, "its weights are not the current ones")
        return None

    async def _look_at(self, worker: Worker) -> None:
        error = await self._ask(worker)
        if error is not None or worker.health is None:
            worker.beats.failed()
            state = WorkerState.LOST if worker.beats.is_open else WorkerState.SUSPECT
            self._enter(worker, state, str(error))
            return
        worker.beats.succeeded()
        if not worker.health.is_ready:
            self._enter(worker, WorkerState.DRAINING, "it says that it is not ready")
        elif worker.traffic.wait_s > 0:
            self._enter(worker, WorkerState.LOST, "it loses requests though it says it is well")
        elif self._has_current_weights(worker):
            self._enter(worker, WorkerState.SERVING, "it is well")
        else:
            await self._bring_up(worker)

    def _has_current_weights(self, worker: Worker) -> bool:
        if self._weights is None:
            return True
        if self._updating.locked() and worker.state is WorkerState.SERVING:
            return True  # the update settles what it has, and until then nothing changes
        version, health = self._weights.version, worker.health
        return (
            health is not None
            and worker.taken == (health.instance_id, version)
            and health.policy_version == version
        )

    async def _bring_up(self, worker: Worker) -> None:
        """Give the current weights to an engine that has others: it was away, or started anew."""
        self._enter(worker, WorkerState.JOINING, "its weights are not the current ones")
        weights = self._weights
        if weights is not None:
            error = await self._push(worker, weights)
            if error is not None:
                self._enter(worker, WorkerState.STALE, str(error))
                return
        if weights is self._weights:
            self._enter(worker, WorkerState.SERVING, "it has the current weights")
        else:
            worker.wake.set()  # newer ones came meanwhile

    def _leave(self, worker: Worker, state: WorkerState, reason: str) -> None:
        """Let an engine serve no more, if it does, and look at it at once."""
        if worker.state is WorkerState.SERVING:
            self._enter(worker, state, reason)
            if state is not WorkerState.STALE:
                worker.wake.set()

    def _enter(self, worker: Worker, state: WorkerState, reason: str) -> None:
        if state is worker.state:
            return
        level = logging.INFO if state is WorkerState.SERVING else logging.WARNING
        _log.log(level, "engine %s was %s, is %s: %s", worker.name, worker.state, state, reason)
        worker.enter(state, reason)
        if state is WorkerState.SERVING:
            self._placement.add(worker.name, worker)
        else:
            self._placement.remove(worker)
        self._changed.set()
        self._changed = asyncio.Event()
