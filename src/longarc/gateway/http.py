"""The HTTP door: three dialects over the gateway's sessions.

::

    POST /v1/chat/completions        key as bearer token or x-api-key     GET /v1/models[/NAME]     GET /health
    POST /v1/responses               or in the path, for all of them:     GET /openapi.json         HEAD /
    POST /v1/messages[/count_tokens] /s/{key}/v1/...

Starlette only routes and frames; the dialects translate, ``turns`` asks, ``session`` answers. A client that
hangs up cancels its request in the engine, and nothing of it is recorded.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from longarc.errors import ContractError, EngineError, LongArcError, boundary
from longarc.gateway.access import Access
from longarc.gateway.chat_completions import ChatCompletions
from longarc.gateway.core import Gateway
from longarc.gateway.dialect import ChatRequest, Dialect, Exchange, Surroundings, json_bytes
from longarc.gateway.messages import Messages
from longarc.gateway.messages_events import model_card
from longarc.gateway.openapi import description
from longarc.gateway.responses import Responses
from longarc.gateway.session import GatewaySession
from longarc.gateway.sse import EventResponse, Events
from longarc.gateway.stored_answers import StoredAnswers
from longarc.gateway.turns import Asking, StreamedTurn, answers_to
from longarc.gateway.wire import WireError, as_wire, busy, too_long, too_slow, unknown_model

_log = logging.getLogger(__name__)

_HUNG_UP: Final = 499
_CHAT, _RESPONSES, _MESSAGES = ChatCompletions(), Responses(), Messages()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How the door behaves."""

    models: tuple[str, ...] = ("longarc",)
    """Names of the one model, all under ``/v1/models``."""
    takes_other_models: bool = True
    """Whether a request may name any other model, and gets this one. In a rollout it may: an agent program that is
    trained names models of its own, for side requests too. A served model is asked for by one of its names."""
    honours_sampling: bool = False
    """Whether a request's temperature, top_p, top_k, seed and thinking count. In a rollout they do not: the run decides
    how its policy is sampled, and an agent program does not know that it is being trained."""
    max_body_bytes: int = 32 << 20
    """Longest request body [bytes]."""
    body_timeout_s: float = 120.0
    """How long a client may take to send a body [seconds]."""
    max_concurrent: int = 1024
    """Requests answered at once; more get 429."""
    max_concurrent_per_session: int = 64
    """Of one session; more get 429, so that no session takes the room of the others."""
    ping_s: float = 10.0
    """How long a stream may be silent before it says that it lives [seconds]."""
    send_timeout_s: float = 120.0
    """How long a client may take for what is written to it; then it counts as gone [seconds]."""


def build_app(
    gateway: Gateway,
    access: Access,
    settings: HttpSettings | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> Starlette:
    """Return the ASGI application.

    Args:
        gateway: whose engine and tokenizer answer.
        access: which session a key opens.
        settings: how the door behaves; None for the defaults.
        clock: seconds since the epoch, for ``created``.
    """
    door = _Door(gateway, access, settings or HttpSettings(), clock)
    routes = [
        Route("/health", door.health, methods=["GET"]),
        Route("/openapi.json", door.openapi, methods=["GET"]),
    ]
    for prefix in ("", "/s/{key}"):
        routes += [
            Route(prefix or "/", door.root, methods=["GET"]),
            Route(f"{prefix}/v1/chat/completions", door.turn(_CHAT), methods=["POST"]),
            Route(f"{prefix}/v1/responses", door.turn(_RESPONSES), methods=["POST"]),
            Route(f"{prefix}/v1/messages", door.turn(_MESSAGES), methods=["POST"]),
            Route(f"{prefix}/v1/messages/count_tokens", door.count_tokens, methods=["POST"]),
            Route(f"{prefix}/v1/models", door.models, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{model:path}}", door.model, methods=["GET"]),
        ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


class _Door:
    def __init__(
        self, gateway: Gateway, access: Access, settings: HttpSettings, clock: Callable[[], float]
    ) -> None:
        self._gateway = gateway
        self._access = access
        self._settings = settings
        self._clock = clock
        self._stored = StoredAnswers()
        self._num_running = 0
        self._running: Counter[str] = Counter()

    def turn(self, dialect: Dialect) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint that answers conversations of a dialect."""

        async def endpoint(request: Request) -> Response:
            return await self._turn(request, dialect)

        return endpoint

    async def root(self, request: Request) -> Response:
        """Say that this is a gateway; some clients ask before they send anything."""
        try:
            if "key" in request.path_params:
                self._session(request)
        except WireError as error:
            return _error(error, _dialect_of(request))
        return _json({"name": "longarc gateway", "description": "/openapi.json"})

    async def openapi(self, request: Request) -> Response:
        """Describe the routes."""
        return _json(description())

    async def count_tokens(self, request: Request) -> Response:
        """Say how many tokens a conversation's prompt would have."""
        try:
            session = self._session(request)
            asked = _MESSAGES.read_count(await self._body(request))
            self._check_model(asked)
            with boundary(ContractError, "counting the tokens of a prompt"):
                return _json({"input_tokens": self._num_prompt_tokens(session, asked)})
        except LongArcError as error:
            return _error(self._wire(error), _MESSAGES)
        except ClientDisconnect:
            return Response(status_code=_HUNG_UP)

    async def models(self, request: Request) -> Response:
        """List the names of the one model."""
        dialect = _dialect_of(request)
        try:
            self._session(request)
        except WireError as error:
            return _error(error, dialect)
        names = self._settings.models
        if dialect is _MESSAGES:
            cards = [model_card(name) for name in names]
            ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
            return _json({"data": cards} | ends)
        return _json({"object": "list", "data": [_model_card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Tell one of the names."""
        dialect = _dialect_of(request)
        try:
            self._session(request)
            name = request.path_params["model"]
            if name not in self._settings.models:
                raise unknown_model(name, self._settings.models)
        except WireError as error:
            return _error(error, dialect)
        return _json(model_card(name) if dialect is _MESSAGES else _model_card(name))

    async def health(self, request: Request) -> Response:
        """Say whether the engine answers."""
        try:
            with boundary(EngineError, "asking the engine for its health"):
                health = await self._gateway.engine.health()
        except LongArcError as error:
            return _error(as_wire(error), _CHAT)
        body = {
            "status": "ok" if health.is_ready else "not_ready",
            "policy_version": health.policy_version,
            "num_sessions": self._gateway.num_open_sessions,
            "num_requests": self._num_running,
        }
        return _json(body, status=200 if health.is_ready else 503)

    async def _turn(self, request: Request, dialect: Dialect) -> Response:
        """Answer a conversation; whatever goes wrong becomes a response in the dialect's form."""
        if self._num_running >= self._settings.max_concurrent:
            return _error(busy(self._settings.max_concurrent), dialect)
        self._num_running += 1
        streams, running = False, None
        try:
            session = self._session(request)
            running = session.settings.session_id
            self._running[running] += 1
            if self._running[running] > self._settings.max_concurrent_per_session:
                raise busy(self._settings.max_concurrent_per_session, " of this session")
            body = await self._body(request)
            with boundary(ContractError, f"reading {dialect.name}"), _noted(session):
                exchange, asking = self._read(request, session, body, dialect)
            if asking.request.streams:
                streams = True
                return self._stream(exchange, asking, dialect)
            return await _until_hang_up(request, self._whole(exchange, asking, dialect))
        except LongArcError as error:
            return _error(self._wire(error), dialect)
        except ClientDisconnect:
            return Response(status_code=_HUNG_UP)
        finally:
            if not streams:
                self._ended(running)

    def _ended(self, session_id: str | None) -> None:
        self._num_running -= 1
        if session_id is not None:
            self._running[session_id] -= 1
            if not self._running[session_id]:
                del self._running[session_id]

    def _read(
        self, request: Request, session: GatewaySession, body: bytes, dialect: Dialect
    ) -> tuple[Exchange, Asking]:
        tokenizer = self._gateway.chat_format.tokenizer
        around = Surroundings(
            tokenizer=tokenizer, created_s=int(self._clock()), history=session.history
        )
        exchange = dialect.read(body, around)
        self._check_model(exchange.request)
        asking = Asking(
            session=session,
            request=self._stored.whole(session, exchange.request),
            headers=dict(request.headers.items()),
            # SHA-256 has instructions of its own on most processors, which is twice as fast.
            body_digest=hashlib.sha256(body).digest()[:16],
            honours_sampling=self._settings.honours_sampling,
        )
        return exchange, asking

    async def _whole(self, exchange: Exchange, asking: Asking, dialect: Dialect) -> Response:
        try:
            with boundary(ContractError, f"answering {dialect.name}"):
                answers = await answers_to(asking)
                self._stored.keep(asking, exchange.response_id, answers)
                return _json(exchange.whole(answers))
        except LongArcError as error:
            return _error(self._wire(error, asking.session), dialect)

    def _stream(self, exchange: Exchange, asking: Asking, dialect: Dialect) -> EventResponse:
        turn = StreamedTurn(asking, exchange, self._gateway.chat_format)

        async def work(events: Events) -> None:
            try:
                with boundary(ContractError, f"answering {dialect.name}"):
                    answers = await turn.run(events)
                    self._stored.keep(asking, exchange.response_id, answers)
            except LongArcError as error:
                wire = self._wire(error, asking.session)
                if events.has_begun:
                    events.put(turn.failure(wire))
                else:
                    events.refused = _error(wire, dialect)

        return EventResponse(
            work,
            turn.ping,
            ping_s=self._settings.ping_s,
            send_timeout_s=self._settings.send_timeout_s,
            on_end=partial(self._ended, asking.session.settings.session_id),
        )

    def _wire(self, error: LongArcError, session: GatewaySession | None = None) -> WireError:
        """Return what the client is told; what is our own mistake is logged, without what was said."""
        if isinstance(error, ContractError):
            cause = error.__cause__ or error
            frame = _last_frame(cause)
            name = "" if session is None else f" of session {session.settings.session_id}"
            _log.error("a request%s failed: %s at %s", name, type(cause).__name__, frame)
            _log.debug("the error with its message", exc_info=error)
        return as_wire(error)

    def _num_prompt_tokens(self, session: GatewaySession, asked: ChatRequest) -> int:
        thinking = asked.thinking if self._settings.honours_sampling else None
        return session.num_prompt_tokens(asked.messages, tools=asked.tools, thinking=thinking)

    def _check_model(self, asked: ChatRequest) -> None:
        if not self._settings.takes_other_models and asked.model not in self._settings.models:
            raise unknown_model(asked.model, self._settings.models)

    def _session(self, request: Request) -> GatewaySession:
        return self._access.session(
            path_key=request.path_params.get("key"), bearer=_shown_key(request)
        )

    async def _body(self, request: Request) -> bytes:
        """Read a body, if it comes in time and is not too long."""
        limit, limit_s = self._settings.max_body_bytes, self._settings.body_timeout_s
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_long(limit)
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(limit_s):
                async for chunk in request.stream():
                    num_bytes += len(chunk)
                    if num_bytes > limit:
                        raise too_long(limit)
                    chunks.append(chunk)
        except TimeoutError:
            raise too_slow(limit_s) from None
        return b"".join(chunks)


@contextmanager
def _noted(session: GatewaySession) -> Iterator[None]:
    """Let the session know that its program asked for something that is not done here."""
    try:
        yield
    except WireError as error:
        session.last_refusal = error.message
        raise


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "longarc"}


def _shown_key(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key") or None


def _dialect_of(request: Request) -> Dialect:
    """Return the dialect that errors and lists are told in, where no body says it."""
    path = request.url.path
    if "anthropic-version" in request.headers or "/v1/messages" in path:
        return _MESSAGES
    return _RESPONSES if path.endswith("/v1/responses") else _CHAT


async def _until_hang_up(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """Return the response, or cancel the work when the client hangs up first."""
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(answering, name="answer")

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            work.cancel()

        watching = tasks.create_task(watch(), name="watch for hang-up")
        work.add_done_callback(lambda _: watching.cancel())
    return Response(status_code=_HUNG_UP) if work.cancelled() else work.result()


def _last_frame(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "an unknown place"
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _error(error: WireError, dialect: Dialect) -> Response:
    return _json(dialect.error(error), status=error.status, headers=error.headers)


def _json(
    body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        json_bytes(body), status_code=status, headers=headers, media_type="application/json"
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer paths and methods that do not exist in the dialect's own form."""
    assert isinstance(error, HTTPException)
    # The path may hold a key, which the client knows and a log must not.
    where = f"{request.method} {request.url.path}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    wire = WireError(
        error.status_code,
        f"{where}: {error.detail}",
        code=code,
        headers=dict(error.headers or {}),  # of a method: which there are instead
    )
    return _error(wire, _dialect_of(request))
