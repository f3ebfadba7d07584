"""Limits of a connection before there is a request: how long and how large its head may be.

Uvicorn itself waits for ever for the end of a request's head and keeps all of it. A body has its limits in
``http``, where a request is known.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits:
    """Of the request line and the headers together."""

    max_bytes: int = 64 << 10
    """Longer heads get 431 [bytes]."""
    timeout_s: float = 20.0
    """Slower heads get 408 [seconds]."""
    max_connections: int = 4096
    """Open at once to one server; one more is closed, before it costs more than that."""


def limited_protocol(limits: HeadLimits) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with limits."""

    class Limited(_LimitedProtocol):
        head_limits = limits

    return Limited


class _LimitedProtocol(HttpToolsProtocol):
    head_limits: HeadLimits
    _num_head_bytes = 0
    """Received since the head began, in whole reads."""
    _num_header_bytes = 0
    """Of the headers that are complete."""
    _reads_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.head_limits.max_connections:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = True
        self._num_head_bytes = self._num_header_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._reads_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_header_bytes += len(name) + len(value) + len(b": \r\n")
        if self._num_header_bytes > self.head_limits.max_bytes:
            # The parser turns this into its own error, which ends in ``send_400_response``.
            raise ValueError("the head of the request is too long")

    def data_received(self, data: bytes) -> None:
        if self._reads_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        too_long = self._reads_head and self._num_head_bytes > self.head_limits.max_bytes
        if too_long and not self.transport.is_closing():
            self._refuse_length()

    def send_400_response(self, msg: str) -> None:
        if max(self._num_head_bytes, self._num_header_bytes) > self.head_limits.max_bytes:
            self._refuse_length()
        else:
            self._refuse(400, msg)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_limits.timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            limit_s = self.head_limits.timeout_s
            self._refuse(408, f"the head of the request did not arrive within {limit_s:g} s")

    def _refuse_length(self) -> None:
        limit = self.head_limits.max_bytes
        self._refuse(431, f"the head of the request is longer than {limit} bytes; send less")

    def _refuse(self, status: int, message: str) -> None:
        """Answer in a form that clients of all dialects read, and hang up."""
        error = {
            "type": "invalid_request_error",
            "message": message,
            "param": None,
            "code": "bad_request_head",
        }
        body = orjson.dumps({"type": "error", "error": error})
        head = (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n" % (status, _REASONS[status], len(body))
        )
        self.transport.write(head + body)
        self.transport.close()
