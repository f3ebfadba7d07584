"""A response of server-sent events: what is written when, pings, and clients that go away.

::

    work --put--> Events --next--> socket        consumes: what the work puts; waits for: work, silence, the client
                    ^ silence: ping                unblocked by: an event, ``ping_s``, a hang-up, the end of the work

Nothing is written before the first event or the first ping, so a request that fails at once still gets
the status of its error.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies would collect events otherwise.
    (b"x-accel-buffering", b"no"),
]


class Events:
    """Bytes on their way to one client. Bounded by the length of the answers that they tell."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._news = asyncio.Event()
        self.has_begun = False
        """Whether the response has: an error is an event then, before it a response of its own."""
        self.refused: Response | None = None
        """What is answered in place of events, where nothing has begun."""
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether all that was put is taken, and nothing more comes."""
        return self._has_ended and not self._pending

    def put(self, data: bytes) -> None:
        """Add to what is to be written."""
        if data:
            self._pending.append(data)
            self._news.set()

    def end(self) -> None:
        """Say that nothing more comes."""
        self._has_ended = True
        self._news.set()

    async def next(self, timeout_s: float) -> bytes:
        """Return what was put since the last call; empty after so long a silence, or at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return b""
        data = b"".join(self._pending)
        self._pending.clear()
        if not self._has_ended:
            self._news.clear()
        return data


class EventResponse(Response):
    """Runs the work that answers a request, and writes its events."""

    def __init__(
        self,
        work: Callable[[Events], Awaitable[None]],
        ping: Callable[[], bytes],
        *,
        ping_s: float,
        send_timeout_s: float,
        on_end: Callable[[], None],
    ) -> None:
        """Bind work to a response.

        Args:
            work: puts events, or a refusal; cancelled when the client hangs up.
            ping: what a silent stream says.
            ping_s: how long it may be silent [seconds].
            send_timeout_s: how long the client may take for what is written; then it counts as gone [seconds].
            on_end: called when the response is over, whatever ended it.
        """
        super().__init__()
        self._work = work
        self._ping = ping
        self._ping_s = ping_s
        self._send_timeout_s = send_timeout_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the work is done or the client is gone."""
        events = Events()

        async def work() -> None:
            try:
                await self._work(events)
            finally:
                events.end()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            working.cancel()
            writing.cancel()

        try:
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(work(), name="answer")
                writing = tasks.create_task(
                    self._write(events, scope, receive, send), name="write events"
                )
                watching = tasks.create_task(watch(), name="watch for hang-up")
                writing.add_done_callback(lambda _: working.cancel())
                writing.add_done_callback(lambda _: watching.cancel())
        finally:
            self._on_end()

    async def _write(self, events: Events, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the events end or the client does not take them any more."""
        data = await events.next(self._ping_s)
        if events.refused is not None:
            await events.refused(scope, receive, send)
            return
        events.has_begun = True
        try:
            await self._send(
                send, {"type": "http.response.start", "status": 200, "headers": _HEADERS}
            )
            while not events.has_ended or data:
                body = data or (b"" if events.has_ended else self._ping())
                await self._send(
                    send, {"type": "http.response.body", "body": body, "more_body": True}
                )
                data = b"" if events.has_ended else await events.next(self._ping_s)
            await self._send(send, {"type": "http.response.body", "body": b""})
        except TimeoutError:
            # It does not read: what was sampled is recorded or cancelled like for one that hung up.
            return

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send(message)
