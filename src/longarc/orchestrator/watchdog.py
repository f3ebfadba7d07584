"""Bells and watchdog: how the tasks of a stage wake each other, and who notices that none does."""

import asyncio
from collections.abc import Awaitable, Callable

from longarc.errors import StalledError


class Bell:
    """Wakes everybody who waits for it, each time it rings; nobody who looks first misses a change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake everybody who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next ring."""
        await self._event.wait()


async def watch(
    bell: Bell,
    *,
    timeout_s: float,
    key: str,
    is_alive: Callable[[], Awaitable[bool]],
    describe: Callable[[], str],
) -> None:
    """Raise once nothing has happened for ``timeout_s``; ends only so, or by cancellation.

    Time is the event loop's. A silent bell alone is not a stall: one rollout may be long, so
    ``is_alive`` is asked first whether something moved that rings no bell.

    Args:
        bell: what is listened to.
        timeout_s: how long it may be silent [seconds].
        key: where the recipe says so, for the message.
        is_alive: whether something moved that rings no bell.
        describe: what everybody waits for, in sentences.

    Raises:
        StalledError: nothing rang and nothing moved; says what everybody waits for.
    """
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                await bell.wait()
        except TimeoutError:
            if not await is_alive():
                raise StalledError(
                    f"nothing has moved for {timeout_s:g} s. {describe()} Look at what is waited for; "
                    f"if it is only slow, raise {key}."
                ) from None
