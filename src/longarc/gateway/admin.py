"""The door for whoever runs the rollouts: keys minted and revoked, segments fetched, weights announced.

::

    POST   /admin/sessions                    mint a key          GET  /admin/sessions      what there is
    GET    /admin/sessions/{id}/segments      JSON lines, one a segment, in order
    GET    /admin/sessions/{id}/trajectory[?format=atif]    all of it: conversation, turns and segments
    DELETE /admin/sessions/{id}[?turns=delete]    revoke the key; the turns stay unless they are to go too
    POST   /admin/weights                     let the engines load a file
    GET    /metrics                           Prometheus, without a key: it holds no names and no text

It has a key of its own: an agent that is trained must not read or end other sessions.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from longarc.errors import (
    ConfigError,
    ContractError,
    EngineError,
    LongArcError,
    ResourceError,
    WeightsRefusedError,
    boundary,
)
from longarc.gateway.budget import SessionBudget
from longarc.gateway.core import Gateway
from longarc.gateway.dialect import MAX_COUNT
from longarc.gateway.durable import DurableSessions, SessionSpec
from longarc.gateway.meter import CONTENT_TYPE, Meter
from longarc.gateway.wire import WireError, unauthorized
from longarc.records.sampling import MAX_SEED, WeightSource
from longarc.runs.atif import trajectory_to_atif
from longarc.runs.record_json import to_json_line, trajectory_to_json

_MAX_BODY_BYTES = 1 << 16

Asked = TypeVar("Asked", bound=BaseModel)


class _Mint(BaseModel):
    """The body of ``POST /admin/sessions``; what is left out is as the gateway was started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0, le=MAX_COUNT)
    min_p: float | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    max_new_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_context_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    thinking: bool | None = None
    max_sampled_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_requests: int | None = Field(None, ge=1, le=MAX_COUNT)
    max_wall_s: float | None = Field(None, gt=0)


class _Weights(BaseModel):
    """The body of ``POST /admin/weights``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    policy_version: int = Field(ge=0, le=MAX_SEED)


class AdminDoor:
    """Routes over the sessions of one gateway."""

    def __init__(
        self,
        gateway: Gateway,
        sessions: DurableSessions,
        defaults: SessionSpec,
        meter: Meter,
        *,
        admin_key: str,
    ) -> None:
        """Bind it.

        Args:
            gateway: whose engine gets weights.
            sessions: what keys are minted for.
            defaults: of sessions that ask for nothing else; its context is the longest that is given.
            meter: counts requests.
            admin_key: what requests must show as bearer token.

        Raises:
            ConfigError: the key is empty.
        """
        if not admin_key:
            raise ConfigError("the admin door needs a key, and it may not be empty")
        self._gateway = gateway
        self._sessions = sessions
        self._defaults = defaults
        self._meter = meter
        self._key_digest = _digest(admin_key)

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/admin/sessions/{session_id}"
        return [
            Route("/admin/sessions", self._guarded(self._mint), methods=["POST"]),
            Route("/admin/sessions", self._guarded(self._list), methods=["GET"]),
            Route(one, self._guarded(self._revoke), methods=["DELETE"]),
            Route(f"{one}/segments", self._guarded(self._segments), methods=["GET"]),
            Route(f"{one}/trajectory", self._guarded(self._trajectory), methods=["GET"]),
            Route("/admin/weights", self._guarded(self._weights), methods=["POST"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Check the key first; whatever goes wrong becomes a response."""

        async def guarded(request: Request) -> Response:
            try:
                if not self._is_key(request):
                    raise unauthorized("the admin key is missing or wrong; send it as bearer token")
                with boundary(ContractError, f"{request.method} {request.url.path}"):
                    return await answer(request)
            except WireError as error:
                return _error(error)
            except LongArcError as error:
                return _error(_as_wire(error))

        return guarded

    def _is_key(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        shown = token.strip() if scheme.lower() == "bearer" else ""
        return hmac.compare_digest(_digest(shown), self._key_digest)

    async def _mint(self, request: Request) -> Response:
        asked = await _body(request, _Mint)
        session_id, key = self._sessions.open(asked.session_id, self._spec(asked))
        base = str(request.base_url).rstrip("/")
        body = {"session_id": session_id, "key": key, "base_url": f"{base}/s/{key}/v1"}
        return _json(body, status=201)

    def _spec(self, asked: _Mint) -> SessionSpec:
        own = self._defaults
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens")
            if (value := getattr(asked, name)) is not None
        }
        try:
            sampling = replace(own.sampling, **given)
        except ContractError as error:
            raise WireError(400, str(error)) from error
        longest = own.max_context_tokens
        if (asked.max_context_tokens or 0) > longest:
            raise WireError(
                400,
                f"max_context_tokens={asked.max_context_tokens} is more than the {longest} tokens that this gateway "
                f"gives; ask for {longest} or less",
                param="max_context_tokens",
            )
        return SessionSpec(
            sampling=sampling,
            thinking=own.thinking if asked.thinking is None else asked.thinking,
            max_context_tokens=asked.max_context_tokens or longest,
            budget=SessionBudget(
                max_sampled_tokens=asked.max_sampled_tokens,
                max_requests=asked.max_requests,
                max_wall_s=asked.max_wall_s,
            ),
        )

    async def _list(self, request: Request) -> Response:
        return _json({"sessions": [asdict(state) for state in self._sessions.states()]})

    async def _revoke(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        turns = request.query_params.get("turns", "keep")
        if turns not in ("keep", "delete"):
            raise WireError(400, f"turns={turns[:40]!r} has to be keep or delete", param="turns")
        if turns == "delete":
            await self._sessions.delete(session_id)
        else:
            await self._sessions.revoke(session_id)
        return _json({"session_id": session_id, "is_open": False})

    async def _segments(self, request: Request) -> Response:
        segments = self._sessions.segments(request.path_params["session_id"])
        lines = b"".join(orjson.dumps(segment) + b"\n" for segment in segments)
        return Response(lines, media_type="application/x-ndjson")

    async def _trajectory(self, request: Request) -> Response:
        form = request.query_params.get("format", "jsonl")
        if form not in ("jsonl", "atif"):
            raise WireError(400, f"format={form[:40]!r} has to be jsonl or atif", param="format")
        trajectory = self._sessions.trajectory(request.path_params["session_id"])
        to_json = trajectory_to_atif if form == "atif" else trajectory_to_json
        return Response(f"{to_json_line(to_json(trajectory))}\n", media_type="application/json")

    async def _weights(self, request: Request) -> Response:
        asked = await _body(request, _Weights)
        with boundary(EngineError, "giving the engines new weights"):
            await self._gateway.engine.update_weights(
                WeightSource(path=asked.path, sha256=asked.sha256),
                policy_version=asked.policy_version,
            )
        return _json({"policy_version": asked.policy_version})

    async def _metrics(self, request: Request) -> Response:
        health = None
        try:
            with boundary(EngineError, "asking the engine for its health"):
                health = await self._gateway.engine.health()
        except LongArcError:
            pass  # a scrape says that the engine is lost by its gauge
        page = self._meter.exposition(
            num_open=self._sessions.num_open,
            num_resident=self._gateway.num_open_sessions,
            health=health,
        )
        return Response(page, headers={"content-type": CONTENT_TYPE})


async def _body(request: Request, kind: type[Asked]) -> Asked:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise WireError(413, f"the body is longer than {_MAX_BODY_BYTES} bytes")
    try:
        return kind.model_validate_json(bytes(data) or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WireError(
            400,
            f"{where or 'the body'}: {first['msg']}; known are {sorted(kind.model_fields)}",
            param=where or None,
        ) from None


def _as_wire(error: LongArcError) -> WireError:
    if isinstance(error, ConfigError):
        return WireError(400, str(error))
    if isinstance(error, WeightsRefusedError):
        return WireError(409, str(error), code="weights_refused")
    if isinstance(error, EngineError):
        return WireError(503, str(error), kind="server_error", code="engine_error")
    if isinstance(error, ResourceError):
        return WireError(507, str(error), kind="server_error", code="no_room")
    return WireError(500, str(error), kind="server_error", code="internal_error")


def _error(error: WireError) -> Response:
    return _json(error.body(), status=error.status)


def _json(body: object, *, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
