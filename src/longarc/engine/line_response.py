"""The response of ``POST /v1/stream``: one line of JSON per piece, until the client hangs up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longarc.engine.lifeline import Lifeline
from longarc.engine.prometheus import DoorCounters
from longarc.engine.streams import closing
from longarc.engine.wire import INSTANCE_HEADER, dumps, error_body, error_status
from longarc.errors import EngineError, EngineLostError, LongArcError, boundary
from longarc.records.sampling import SampledTokens

_TYPE = b"application/x-ndjson"


class LineResponse(Response):
    """Sends pieces as they come; an error before the first one decides the status, a later one is a line."""

    def __init__(
        self,
        pieces: AsyncIterator[SampledTokens],
        *,
        lifeline: Lifeline,
        counted: Callable[[], AbstractContextManager[None]],
        counters: DoorCounters,
        instance_id: str,
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._lifeline = lifeline
        self._counted = counted
        self._counters = counters
        self._instance_id = instance_id
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, or cancel the request when the client hangs up."""
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._send_counted(send), name="send pieces")

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                work.cancel()

            watching = tasks.create_task(watch(), name="watch for hang-up")
            work.add_done_callback(lambda _: watching.cancel())

    async def _send_counted(self, send: Send) -> None:
        with self._counted():
            await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        end = "disconnected"
        try:
            async with closing(self._pieces):
                end = await self._send_pieces(send)
        except LongArcError as error:
            end = type(error).__name__
            await self._send_line(send, error_body(error), status=error_status(error))
        except OSError:  # the client is gone, which the server notices when it sends
            return
        finally:
            self._counters.end(end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pieces(self, send: Send) -> str:
        while True:
            async with self._lifeline.hold():
                with boundary(EngineError, "the engine failed"):
                    piece = await anext(self._pieces, None)
            if piece is None:
                raise EngineLostError("the engine ended a completion without a finish reason")
            await self._send_line(send, dumps(piece), status=200)
            if piece.finish_reason is not None:
                return piece.finish_reason

    async def _send_line(self, send: Send, line: bytes, *, status: int) -> None:
        if not self._has_started:
            self._has_started = True
            headers = [
                (b"content-type", _TYPE),
                (INSTANCE_HEADER.encode(), self._instance_id.encode()),
            ]
            await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})
