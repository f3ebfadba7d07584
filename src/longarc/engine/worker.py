"""One engine behind the router: how it is, and what hangs on it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from longarc.config.routing import RoutingConfig
from longarc.engine.breaker import CircuitBreaker
from longarc.engine.lifeline import Lifeline
from longarc.records.ports import Engine
from longarc.records.sampling import EngineHealth

_LEAST_WEIGHT = 0.1
"""Share of an engine that has just come back, relative to one that is warm."""
_NOTHING = EngineHealth(
    is_ready=False,
    policy_version=0,
    num_running=0,
    num_waiting=0,
    num_sampled_tokens=0,
    num_prompt_tokens=0,
    num_cached_tokens=0,
)


class WorkerState(StrEnum):
    """What the router makes of an engine."""

    JOINING = "joining"
    """Not heard of yet, or it has not got the current weights yet."""
    SERVING = "serving"
    SUSPECT = "suspect"
    """A request was lost on it or a heartbeat was missed: nothing new, but what runs may end."""
    DRAINING = "draining"
    """It says that it is not ready: nothing new, but what runs may end."""
    LOST = "lost"
    """Too many failures in a row: what runs on it goes on elsewhere."""
    STALE = "stale"
    """It could not take the current weights: what runs on it goes on elsewhere."""


_CUT_OFF = (WorkerState.LOST, WorkerState.STALE)


class Worker:
    """One engine: a rank of a server, or anything that satisfies the port."""

    def __init__(
        self, name: str, engine: Engine, config: RoutingConfig, clock: Callable[[], float]
    ) -> None:
        self.name, self.engine = name, engine
        self._config, self._clock = config, clock
        self.state = WorkerState.JOINING
        self.lifeline = Lifeline()
        self.beats, self.traffic = self._breaker(), self._breaker()
        """Heartbeats, and requests: an engine may say that it is well and yet lose every request."""
        self.num_open = 0
        """Requests of the router that run on it."""
        self.wake = asyncio.Event()
        """Set when it is to be looked at before the next heartbeat."""
        self.looked_at = asyncio.Event()
        """Set once it was asked how it is."""
        self.taken: tuple[str, int] | None = None
        """Instance and policy version of the weights that the router last gave it."""
        self._serving_since_s = clock()
        self._health: EngineHealth | None = None
        self._before = _NOTHING
        """What earlier starts of this engine had counted."""

    def _breaker(self) -> CircuitBreaker:
        config = self._config
        return CircuitBreaker(
            num_failures=config.num_failures,
            retry_after_s=config.retry_after_s,
            max_retry_after_s=config.max_retry_after_s,
            clock=self._clock,
        )

    @property
    def health(self) -> EngineHealth | None:
        """What it last said of itself, counters going on over its restarts; None before it said anything."""
        if self._health is None:
            return None
        now, before = self._health, self._before
        return replace(
            now,
            num_sampled_tokens=now.num_sampled_tokens + before.num_sampled_tokens,
            num_prompt_tokens=now.num_prompt_tokens + before.num_prompt_tokens,
            num_cached_tokens=now.num_cached_tokens + before.num_cached_tokens,
            num_recomputed_tokens=now.num_recomputed_tokens + before.num_recomputed_tokens,
            num_preemptions=now.num_preemptions + before.num_preemptions,
            busy_s=now.busy_s + before.busy_s,
        )

    @property
    def weight(self) -> float:
        """Its share of new sessions relative to a warm engine's, in (0, 1]."""
        if self._config.slow_start_s <= 0:
            return 1.0
        warm = (self._clock() - self._serving_since_s) / self._config.slow_start_s
        return min(1.0, max(_LEAST_WEIGHT, warm))

    @property
    def pause_s(self) -> float:
        """Time until it is to be looked at again [seconds]."""
        if self.state is WorkerState.STALE:
            return self._config.max_retry_after_s
        return max(self.beats.wait_s, self.traffic.wait_s) or self._config.heartbeat_s

    def note(self, health: EngineHealth) -> None:
        """Remember what it said of itself."""
        last = self._health
        if last is not None and (
            health.instance_id != last.instance_id
            or health.num_sampled_tokens < last.num_sampled_tokens
        ):
            self._before = self.health or _NOTHING
        self._health = health

    def enter(self, state: WorkerState, reason: str) -> None:
        """Change the state; what runs is cut off where it cannot end well."""
        if self.state in _CUT_OFF:
            self.lifeline = Lifeline()
        if state in _CUT_OFF:
            self.lifeline.cut(f"{self.name} is {state}: {reason}")
            self.taken = None
        elif state is WorkerState.SERVING and self.state is not WorkerState.SUSPECT:
            self._serving_since_s = self._clock()
        self.state = state
