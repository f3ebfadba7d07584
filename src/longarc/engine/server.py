"""An engine's HTTP door: ids in, a line of JSON per piece out.

::

    GET  /health               no key   200 while requests are taken, 503 while the server drains or the engine is gone
    GET  /metrics              key      Prometheus' text format
    GET  /v1/engine            key      EngineDescription
    GET  /v1/health?rank=0     key      EngineHealth
    POST /v1/stream            key      StreamRequest -> lines: SampledTokens ..., the last with a finish reason, or an error
    POST /v1/score             key      ScoreRequest -> ScoreReply
    POST /v1/update_weights    key      UpdateRequest -> {}

Lines (NDJSON) and not server-sent events: the reader is a program that wants each line whole, and
reconnecting, which events add, is what the router does from the tokens it kept. A client that hangs up
cancels its request in the engine. A key lets its holder load any weights that the server can read, so it
is to be kept like one for a shell.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from longarc.engine.lifeline import Lifeline
from longarc.engine.line_response import LineResponse
from longarc.engine.prometheus import CONTENT_TYPE, DoorCounters, exposition
from longarc.engine.wire import (
    INSTANCE_HEADER,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    EngineDescription,
    ScoreReply,
    ScoreRequest,
    StreamRequest,
    UpdateReply,
    UpdateRequest,
    dumps,
    error_body,
    error_status,
    loads,
)
from longarc.errors import (
    ConfigError,
    EngineBusyError,
    EngineError,
    EngineLostError,
    EngineRequestError,
    LongArcError,
    boundary,
)
from longarc.records.ports import Engine

_HUNG_UP = 499
_UNAUTHORISED = 401
_MAX_RANK_DIGITS = 9
_LAST_WORDS_S = 5.0
"""What cut-off clients have to read why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """How the door behaves."""

    api_key: str
    """What requests must show as bearer token."""
    max_body_bytes: int = 32 << 20
    """Longest request body [bytes]."""
    max_open: int = 4096
    """Requests answered at once; one more is refused with `EngineBusyError`."""


class EngineDoor:
    """The routes over one engine per rank, and the way to close them without losing a request."""

    def __init__(
        self, ranks: Sequence[Engine], description: EngineDescription, settings: DoorSettings
    ) -> None:
        """Bind the engines.

        Raises:
            ConfigError: the key is empty.
        """
        if not settings.api_key:
            raise ConfigError("an engine server needs a key, and it may not be empty")
        self._ranks = ranks
        self._description = description
        self._settings = settings
        self._key_digest = _digest(settings.api_key)
        self._counters = DoorCounters()
        # An engine lives as long as its server; whoever starts both anew starts with its first weights.
        self._instance_id = secrets.token_hex(8)
        self._lifeline = Lifeline()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._liveness, methods=["GET"]),
                Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
                Route("/v1/engine", self._guarded(self._describe), methods=["GET"]),
                Route("/v1/health", self._guarded(self._health), methods=["GET"]),
                Route("/v1/stream", self._guarded(self._stream), methods=["POST"]),
                Route("/v1/score", self._guarded(self._score), methods=["POST"]),
                Route("/v1/update_weights", self._guarded(self._update), methods=["POST"]),
            ],
            exception_handlers={HTTPException: _no_such_route},
        )

    async def drain(self, *, within_s: float) -> None:
        """Take no new requests and let those that run end; what is left then ends with `EngineLostError`.

        Args:
            within_s: how long they may take [seconds].
        """
        self._counters.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_idle.wait()
        self._lifeline.cut(f"the server stopped after it had drained for {within_s:g} s")
        # A client that does not read holds its answer up; it is cut off with the server.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._is_idle.wait()

    # Routes ----------------------------------------------------------------------------------

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Check key and protocol first; whatever goes wrong becomes a response."""

        async def guarded(request: Request) -> Response:
            try:
                if not self._is_key(request):
                    error = EngineRequestError(
                        "the key is missing or wrong; send it as bearer token"
                    )
                    return _json(error_body(error), status=_UNAUTHORISED)
                _check_protocol(request)
                with boundary(EngineError, f"{request.method} {request.url.path}"):
                    return await answer(request)
            except ClientDisconnect:
                return Response(status_code=_HUNG_UP)
            except LongArcError as error:
                return _json(error_body(error), status=error_status(error))

        return guarded

    def _is_key(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        shown = token.strip() if scheme.lower() == "bearer" else ""
        return hmac.compare_digest(_digest(shown), self._key_digest)

    async def _liveness(self, request: Request) -> Response:
        status = "draining" if self._counters.is_draining else "not_ready"
        with contextlib.suppress(LongArcError), boundary(EngineError, "asking for health"):
            is_ready = [(await engine.health()).is_ready for engine in self._ranks]
            if not self._counters.is_draining and all(is_ready):
                status = "ok"
        return _json(b'{"status":"%s"}' % status.encode(), status=200 if status == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        healths = [await engine.health() for engine in self._ranks]
        return Response(exposition(healths, self._counters), headers={"content-type": CONTENT_TYPE})

    async def _describe(self, request: Request) -> Response:
        return _json(dumps(self._description))

    async def _health(self, request: Request) -> Response:
        shown = request.query_params.get("rank", "0")
        if not (shown.isdecimal() and len(shown) <= _MAX_RANK_DIGITS):
            raise self._no_rank(repr(shown[:80]))
        health = await self._rank(int(shown)).health()
        # A server that is going to stop is not ready, whatever its engine thinks of itself.
        is_ready = health.is_ready and not self._counters.is_draining
        return _json(dumps(replace(health, is_ready=is_ready, instance_id=self._instance_id)))

    async def _stream(self, request: Request) -> Response:
        asked = loads(StreamRequest, await self._body(request))
        engine = self._rank(asked.rank)
        self._check_open()
        stream = engine.stream(asked.prompt_ids, asked.sampling, session_id=asked.session_id)
        return LineResponse(
            stream,
            lifeline=self._lifeline,
            counted=self._counted,
            counters=self._counters,
            instance_id=self._instance_id,
        )

    async def _score(self, request: Request) -> Response:
        asked = loads(ScoreRequest, await self._body(request))
        engine = self._rank(asked.rank)
        self._check_open()
        with self._counted():
            async with self._lifeline.hold():
                logprobs = await engine.score(asked.token_ids, temperature=asked.temperature)
        return self._answered(ScoreReply(logprobs=tuple(logprobs)))

    async def _update(self, request: Request) -> Response:
        asked = loads(UpdateRequest, await self._body(request))
        engine = self._rank(asked.rank)
        self._check_open()
        with self._counted():
            async with self._lifeline.hold():
                await engine.update_weights(asked.source, policy_version=asked.policy_version)
        return self._answered(UpdateReply())

    # Parts of them ---------------------------------------------------------------------------

    def _rank(self, rank: int) -> Engine:
        if not 0 <= rank < len(self._ranks):
            raise self._no_rank(str(rank))
        return self._ranks[rank]

    def _no_rank(self, asked: str) -> EngineRequestError:
        return EngineRequestError(
            f"there is no rank {asked}: this server has 0 .. {len(self._ranks) - 1}"
        )

    def _check_open(self) -> None:
        if self._counters.is_draining:
            raise EngineLostError("the server is going to stop and takes no new requests")
        if self._counters.num_open >= self._settings.max_open:
            raise EngineBusyError(
                f"{self._counters.num_open} requests are open, the limit of this server; send fewer at once"
            )

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Keep the server from stopping meanwhile."""
        self._counters.num_open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._counters.num_open -= 1
            if self._counters.num_open == 0:
                self._is_idle.set()

    async def _body(self, request: Request) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        # Who never sends the rest keeps no server from stopping.
        async with self._lifeline.hold():
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > self._settings.max_body_bytes:
                    raise EngineRequestError(
                        f"the body is longer than {self._settings.max_body_bytes} bytes, the limit of this server"
                    )
                chunks.append(chunk)
        return b"".join(chunks)

    def _answered(self, reply: object) -> Response:
        return _json(dumps(reply), headers={INSTANCE_HEADER: self._instance_id})


def _check_protocol(request: Request) -> None:
    version = request.headers.get(PROTOCOL_HEADER, str(PROTOCOL_VERSION))
    if version != str(PROTOCOL_VERSION):
        raise EngineRequestError(
            f"protocol version {version[:20]!r} is asked for, this server speaks {PROTOCOL_VERSION}; "
            f"run the same LongArc on both sides"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    wrong = EngineRequestError(f"{request.method} {request.url.path}: {error.detail}")
    return _json(error_body(wrong), status=error.status_code)
