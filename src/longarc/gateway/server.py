"""Runs the HTTP door inside the event loop that is already running."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from longarc.errors import EngineError, ResourceError
from longarc.gateway.limits import HeadLimits, limited_protocol

_HEAD_LIMITS = HeadLimits()


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers (they belong to the command line) that says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound_socket(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        ResourceError: the address cannot be had.
    """
    try:
        listener = socket.create_server((host, port), backlog=1024)
    except (OSError, OverflowError) as error:
        raise ResourceError(
            f"cannot listen on {host}:{port}: {error}. Choose another port, or 0 for a free one"
        ) from error
    # Connections inherit it. Without it the end of each answer waits for the client's delayed acknowledgement of its
    # beginning, 40 ms; asyncio sets it only where a socket was made with its protocol's number, which this one is not.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    grace_s: int = 5,
    head_limits: HeadLimits = _HEAD_LIMITS,
) -> AsyncIterator[str]:
    """Serve on a bound socket while the context is open; yields the base URL, without ``/v1``.

    Args:
        app: from ``http.build_app``, or something around it.
        listener: from ``bound_socket``; closed at the end.
        grace_s: how long running requests may take to end at shutdown before they are cancelled
            [seconds].
        head_limits: how long and how slow the head of a request may be.

    Raises:
        EngineError: the server ended by itself.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http=limited_protocol(head_limits),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=grace_s,
        )
    )
    host, port = listener.getsockname()[:2]
    # Not a TaskGroup: it would wrap whatever the caller's own block raises into an exception group.
    running = asyncio.create_task(server.serve(sockets=[listener]), name="gateway server")
    starting = asyncio.create_task(server.is_up.wait(), name="gateway server start")
    try:
        await asyncio.wait((running, starting), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            raise EngineError(f"the gateway's HTTP server did not start on {host}:{port}")
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        starting.cancel()
        server.should_exit = True
        await running
        listener.close()
