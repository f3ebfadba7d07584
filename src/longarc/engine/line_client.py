"""A small HTTP/1.1 client for answers that are lines: one connection a request, kept for the next one.

httpx spends a millisecond of processor time on each request, which is most of what a gateway has for it, and
gives a connection up when its reader does not wait for the very last chunk. Here the parser is httptools', the
reader gets whole lines, and a connection whose answer is as good as over is read to its end in the background.
"""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

MAX_LINE_BYTES: Final = 64 << 20
_HIGH_WATER_BYTES: Final = 1 << 20
_ENDING_S: Final = 1.0


class LineClientError(OSError):
    """The server could not be reached, hung up, or does not speak HTTP."""


class LineClient:
    """Connections to one server."""

    def __init__(
        self,
        address: str,
        *,
        headers: Mapping[str, str],
        connect_timeout_s: float,
        idle_s: float = 2.0,
    ) -> None:
        """Prepare; nothing is connected yet.

        Args:
            address: ``http://host:port`` or ``https://host:port``.
            headers: of every request.
            connect_timeout_s: how long a connection may take to be made [seconds].
            idle_s: an idle connection is given up after this [seconds], before the server does it: or a request
                would now and then meet a closed door.
        """
        parts = urlsplit(address)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        lines = [f"host: {parts.netloc}", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = ("\r\n".join(lines) + "\r\n").encode("latin-1")
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._open: set[_Connection] = set()

    @property
    def num_idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    async def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator["Reply"]:
        """Send a body; yields the answer once its headers are there. Leaving early hangs up.

        Raises:
            LineClientError: something went wrong on the way.
        """
        connection = self._kept() or await self._connected()
        try:
            head = b"POST %s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n" % (
                f"{self._prefix}{path}".encode("ascii"),
                self._head,
                len(body),
            )
            connection.send(head + body)
            await connection.until_headers()
            yield Reply(connection)
        finally:
            self._give_back(connection)

    def _kept(self) -> "_Connection | None":
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            since_s, connection = self._idle.pop()
            if now_s - since_s <= self._idle_s and connection.is_usable:
                return connection
            connection.abort()
        return None

    async def _connected(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise LineClientError(f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise LineClientError(f"{type(error).__name__} {error}") from error
        self._open.add(connection)
        connection.on_lost = self._open.discard
        return connection

    def _give_back(self, connection: "_Connection") -> None:
        if connection.is_usable and connection.is_over:
            self._keep(connection)
        elif connection.is_usable and connection.is_ending:
            connection.on_over = self._keep
            connection.abort_after(_ENDING_S)
        else:
            connection.abort()

    def _keep(self, connection: "_Connection") -> None:
        now_s = asyncio.get_running_loop().time()
        while self._idle and now_s - self._idle[0][0] > self._idle_s:
            self._idle.popleft()[1].abort()
        self._idle.append((now_s, connection))


class Reply:
    """An answer: its status and headers are there, its lines come."""

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers

    def is_as_good_as_over(self) -> None:
        """Say that nothing of interest follows: leaving now keeps the connection."""
        self._connection.is_ending = True

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield lines without their newline, split at newlines alone; what has none at the end is dropped.

        Raises:
            LineClientError: the server hung up before the end, or a line is too long.
        """
        while True:
            line = await self._connection.line()
            if line is None:
                return
            yield line

    async def read(self) -> bytes:
        """Return the whole body."""
        return await self._connection.rest()


class _Connection(asyncio.Protocol):
    """One connection; callbacks of the parser are ``on_*``."""

    def __init__(self) -> None:
        self.on_lost: Callable[[_Connection], None] | None = None
        self.on_over: Callable[[_Connection], None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._error: str | None = None
        self._wakes: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_asked = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_over = self.is_ending = False
        self._has_headers = False
        self._lines: deque[bytes] = deque()
        self._part = bytearray()
        self._num_held = 0
        self._is_paused = False

    # What the client does ------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether the server is still there and kept its promises."""
        return self._error is None

    def send(self, data: bytes) -> None:
        """Begin a request."""
        self._reset()
        self._is_asked = True
        self._transport.write(data)

    async def until_headers(self) -> None:
        """Wait for the headers of the answer."""
        while not self._has_headers:
            await self._more()

    async def line(self) -> bytes | None:
        """Return the next line, or None at the end."""
        while not self._lines:
            if self.is_over:
                return None
            await self._more()
        line = self._lines.popleft()
        self._num_held -= len(line)
        if self._is_paused and self._num_held < _HIGH_WATER_BYTES // 2:
            self._is_paused = False
            self._transport.resume_reading()
        return line

    async def rest(self) -> bytes:
        """Return all that was not read."""
        while not self.is_over:
            if self._is_paused:
                self._is_paused = False
                self._transport.resume_reading()
            await self._more()
        return b"".join([*(line + b"\n" for line in self._lines), bytes(self._part)])

    def abort(self) -> None:
        """Hang up."""
        self._fail("the connection was given up")
        self._transport.abort()

    def abort_after(self, wait_s: float) -> None:
        """Hang up unless the answer is over by then."""
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.abort)

    async def _more(self) -> None:
        if self._error is not None:
            raise LineClientError(self._error)
        self._wakes = asyncio.get_running_loop().create_future()
        try:
            await self._wakes
        finally:
            self._wakes = None

    # What the event loop calls ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if not self._is_asked:
            # It would be read as the beginning of the next answer.
            self._fail("the server speaks without being asked")
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error}")
            self._transport.abort()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_over and self._has_headers and self._ends_with_connection():
            self.on_message_complete()
        self._fail(f"the server hung up{f': {error}' if error else ''}")
        if self.on_lost is not None:
            self.on_lost(self)

    def _ends_with_connection(self) -> bool:
        return (
            "content-length" not in self.headers
            and self.headers.get("transfer-encoding", "") != "chunked"
        )

    def _fail(self, why: str) -> None:
        self._error = self._error or why
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    # What the parser calls -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_headers = self.status >= 200  # below are announcements

    def on_body(self, body: bytes) -> None:
        *lines, rest = body.split(b"\n")
        if lines:
            lines[0] = bytes(self._part) + lines[0]
            self._part.clear()
            self._lines.extend(lines)
            self._num_held += sum(map(len, lines))
        self._part += rest
        if len(self._part) > MAX_LINE_BYTES:
            self._fail(f"the server sends a line of more than {MAX_LINE_BYTES} bytes")
            self._transport.abort()
        elif self._num_held > _HIGH_WATER_BYTES and not self._is_paused:
            self._is_paused = True
            with contextlib.suppress(RuntimeError):
                self._transport.pause_reading()

    def on_message_begin(self) -> None:
        if self.is_over:
            # What is told of the first answer stays: the parser goes no further.
            self._fail("the server answers twice")
            raise LineClientError("the server answers twice")

    def on_message_complete(self) -> None:
        if not self._has_headers:
            return
        self.is_over, self._is_asked = True, False
        if not self._parser.should_keep_alive():
            self._fail("the server closes the connection")
        self._parser = httptools.HttpResponseParser(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        on_over, self.on_over = self.on_over, None
        if on_over is not None and self.is_usable:
            on_over(self)
