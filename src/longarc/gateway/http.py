"""The HTTP door: OpenAI chat completions over the gateway's sessions.

::

    POST /v1/chat/completions      key as bearer token        GET /v1/models[/NAME]      GET /health
    POST /s/{key}/v1/chat/...      key in the path            GET /s/{key}/v1/models[/NAME]

Starlette only routes and frames; ``chat_completions`` translates, ``session`` answers. A client that
hangs up cancels its request in the engine, and nothing of it is recorded.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from longarc.errors import (
    ConfigError,
    ContractError,
    EngineError,
    EngineRequestError,
    LongArcError,
    boundary,
)
from longarc.gateway.access import Access
from longarc.gateway.chat_completions import ChatRequest, read_request, write_response
from longarc.gateway.core import Gateway
from longarc.gateway.session import GatewaySession, SessionClosed
from longarc.gateway.turn_options import TurnOptions
from longarc.gateway.wire import WireError, busy, not_found, unknown_model
from longarc.records.ports import ContextExhausted
from longarc.records.sampling import Sampling

_log = logging.getLogger(__name__)

_HUNG_UP = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """How the door behaves."""

    models: tuple[str, ...] = ("longarc",)
    """Names of the one model, all under ``/v1/models``."""
    takes_other_models: bool = True
    """Whether a request may name any other model, and gets this one. In a rollout it may: an agent program that is
    trained names models of its own, for side requests too. A served model is asked for by one of its names."""
    honours_sampling: bool = False
    """Whether a request's temperature, top_p, seed and thinking count. In a rollout they do not: the run decides
    how its policy is sampled, and an agent program does not know that it is being trained."""
    max_body_bytes: int = 32 << 20
    """Longest request body [bytes]."""
    max_concurrent: int = 1024
    """Requests answered at once; more get 429."""


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
    routes = [Route("/health", door.health, methods=["GET"])]
    for prefix in ("", "/s/{key}"):
        routes += [
            Route(f"{prefix}/v1/chat/completions", door.chat, methods=["POST"]),
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
        self._num_running = 0

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion."""
        if self._num_running >= self._settings.max_concurrent:
            return _error(busy(self._settings.max_concurrent))
        self._num_running += 1
        try:
            session = self._session(request)
            body = await _body(request, max_bytes=self._settings.max_body_bytes)
            work = self._answered(session, body, is_retry=_is_retry(request))
            return await _until_hang_up(request, work)
        except WireError as error:
            return _error(error)
        except ClientDisconnect:
            return Response(status_code=_HUNG_UP)
        finally:
            self._num_running -= 1

    async def models(self, request: Request) -> Response:
        """List the names of the one model."""
        try:
            self._session(request)
        except WireError as error:
            return _error(error)
        data = [_model_card(name) for name in self._settings.models]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Tell one of the names."""
        try:
            self._session(request)
            name = request.path_params["model"]
            if name not in self._settings.models:
                raise unknown_model(name, self._settings.models)
        except WireError as error:
            return _error(error)
        return _json(_model_card(name))

    async def health(self, request: Request) -> Response:
        """Say whether the engine answers."""
        try:
            with boundary(EngineError, "asking the engine for its health"):
                health = await self._gateway.engine.health()
        except LongArcError as error:
            return _error(_as_wire(error))
        body = {
            "status": "ok" if health.is_ready else "not_ready",
            "policy_version": health.policy_version,
            "num_sessions": self._gateway.num_open_sessions,
            "num_requests": self._num_running,
        }
        return _json(body, status=200 if health.is_ready else 503)

    def _session(self, request: Request) -> GatewaySession:
        return self._access.session(
            path_key=request.path_params.get("key"), bearer=_shown_key(request)
        )

    async def _answered(self, session: GatewaySession, body: bytes, *, is_retry: bool) -> Response:
        """Answer a body; whatever goes wrong becomes a response."""
        try:
            with boundary(ContractError, "answering a chat completion"):
                return _json(await self._complete(session, body, is_retry=is_retry))
        except WireError as error:
            return _error(error)
        except LongArcError as error:
            if isinstance(error, ContractError):
                _log.exception("a request of session %s failed", session.settings.session_id)
            return _error(_as_wire(error))

    async def _complete(
        self, session: GatewaySession, body: bytes, *, is_retry: bool
    ) -> dict[str, Any]:
        chat = read_request(body)
        if not self._settings.takes_other_models and chat.model not in self._settings.models:
            raise unknown_model(chat.model, self._settings.models)
        try:
            answer = await session.answer(
                chat.messages,
                tools=chat.tools,
                options=TurnOptions(
                    max_new_tokens=chat.max_new_tokens,
                    tool_choice=chat.tool_choice,
                    sampling=self._sampling(session, chat),
                    thinking=chat.thinking if self._settings.honours_sampling else None,
                    is_retry=is_retry,
                ),
            )
        except ContextExhausted as error:
            raise WireError(
                400, str(error), param="messages", code="context_length_exceeded"
            ) from error
        return write_response(
            answer,
            chat,
            self._gateway.chat_format.tokenizer,
            response_id=f"chatcmpl-{secrets.token_hex(12)}",
            created_s=int(self._clock()),
        )

    def _sampling(self, session: GatewaySession, chat: ChatRequest) -> Sampling | None:
        if not self._settings.honours_sampling:
            return None
        own = session.settings.sampling
        try:
            return replace(
                own,
                temperature=own.temperature if chat.temperature is None else chat.temperature,
                top_p=own.top_p if chat.top_p is None else chat.top_p,
                seed=chat.seed,
            )
        except ContractError as error:  # a value that the dialect has and no engine can sample with
            raise WireError(400, str(error)) from error


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "longarc"}


def _shown_key(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key") or None


def _is_retry(request: Request) -> bool:
    """Whether the client says that it sends this again (the SDKs count their retries in a header)."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


async def _body(request: Request, *, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise WireError(
                413,
                f"the body is longer than {max_bytes} bytes, the limit of this gateway; shorten the "
                f"history",
                code="request_too_large",
            )
        chunks.append(chunk)
    return b"".join(chunks)


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


def _as_wire(error: LongArcError) -> WireError:
    if isinstance(error, SessionClosed):
        return not_found(str(error))
    if isinstance(error, ConfigError | EngineRequestError):  # the same request would fail again
        return WireError(400, str(error))
    if isinstance(error, EngineError):
        # Nothing was recorded, so the client's own retry is safe.
        return WireError(503, str(error), kind="server_error", code="engine_error")
    return WireError(500, str(error), kind="server_error", code="internal_error")


def _error(error: WireError) -> Response:
    return _json(error.body(), status=error.status, headers=error.headers)


def _json(
    body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        orjson.dumps(body), status_code=status, headers=headers, media_type="application/json"
    )


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer paths and methods that do not exist in the dialect's own form."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    return _error(WireError(error.status_code, f"{where}: {error.detail}", code="not_found"))
