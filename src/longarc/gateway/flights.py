"""Requests on their way, so that one that is sent again joins the first instead of being sampled again.

::

    request 1 --starts--> flight (a task of its own) --pieces--> every waiter, from the first piece on
    request 2 --joins-------^                        --answer--> every waiter
    a waiter that is cancelled leaves; the flight ends with the last one
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeAlias, TypeVar

from longarc.gateway.turn_options import OnProgress, TurnStart
from longarc.records.sampling import SampledTokens

Result = TypeVar("Result")
Progress: TypeAlias = TurnStart | SampledTokens
Start: TypeAlias = Callable[[OnProgress], Coroutine[Any, Any, Result]]


class Flights(Generic[Result]):
    """The requests of one session that run and have an identity."""

    def __init__(self) -> None:
        self._running: dict[bytes, _Flight[Result]] = {}

    async def answer(
        self,
        key: bytes,
        start: Start[Result],
        *,
        on_progress: OnProgress | None,
        joins: bool,
        check: Callable[[bytes | None], None],
        body: bytes | None,
    ) -> Result:
        """Start a request, or join the one with its key that runs.

        Args:
            key: what makes two requests the same.
            start: begins the work; gets where its pieces go.
            on_progress: gets every piece, also those that were sampled before this request came.
            joins: False starts a request of its own in any case.
            check: gets the body of the one that runs, and raises where this request is another one.
            body: of this request.
        """
        flight = self._running.get(key) if joins else None
        if flight is None or flight.is_abandoned:
            flight = _Flight(start, body)
            self._running[key] = flight
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        else:
            check(flight.body)
        return await flight.wait(on_progress)

    def _forget(self, key: bytes, flight: "_Flight[Result]") -> None:
        if self._running.get(key) is flight:
            del self._running[key]


class _Flight(Generic[Result]):
    def __init__(self, start: Start[Result], body: bytes | None) -> None:
        self.body = body
        self._pieces: list[Progress] = []
        self._news = asyncio.Event()
        self._num_waiting = 0
        self.is_abandoned = False
        # Not a TaskGroup: the work belongs to all waiters, and outlives the one that began it.
        self.task = asyncio.create_task(start(self._add), name="a request that may be joined")
        self.task.add_done_callback(lambda _: self._news.set())

    async def wait(self, on_progress: OnProgress | None) -> Result:
        """Wait for the answer; see ``Flights.answer``."""
        self._num_waiting += 1
        try:
            if on_progress is not None:
                await self._follow(on_progress)
            return await asyncio.shield(self.task)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and not self.task.done():
                self.is_abandoned = True
                self.task.cancel()
                await asyncio.wait((self.task,))

    async def _follow(self, on_progress: OnProgress) -> None:
        num_seen = 0
        while True:
            news = self._news
            while num_seen < len(self._pieces):
                num_seen += 1
                on_progress(self._pieces[num_seen - 1])
            if self.task.done():
                return
            await news.wait()

    def _add(self, piece: Progress) -> None:
        self._pieces.append(piece)
        news, self._news = self._news, asyncio.Event()
        news.set()
