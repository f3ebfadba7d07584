"""Waits that somebody else can end: what hangs on an engine that is found dead goes on elsewhere at once.

An engine that died without a word leaves whoever waits for its next token waiting for ever. So each such
wait holds a lifeline, and whoever learns of the death (a heartbeat, the end of a drain) cuts it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from longarc.errors import EngineLostError


class Lifeline:
    """What the waits on one engine have in common; once cut it stays cut."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()  # bounded by the requests that are open
        self._reason: str | None = None

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait inside for something that may never come.

        Raises:
            EngineLostError: the lifeline was cut, before or meanwhile.
        """
        if self._reason is not None:
            raise EngineLostError(self._reason)
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if self._reason is None or not wait.expired():
                raise
            raise EngineLostError(self._reason) from error

    def cut(self, reason: str) -> None:
        """End all waits, those that begin later too, with an `EngineLostError` that says ``reason``."""
        if self._reason is None:
            self._reason = reason
            now_s = asyncio.get_running_loop().time()
            for wait in self._waits:
                wait.reschedule(now_s)
