"""One rank of an engine server as an engine: the client of ``server.py``.

Whatever goes wrong between here and there is an `EngineLostError`, which says that another engine may go
on with the request; whatever the server raised comes back as the class it was raised as.
"""

from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import numpy as np
import orjson

from longarc.engine.ids import whole_ids
from longarc.engine.line_client import LineClient, LineClientError
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
    error_of,
    loads,
)
from longarc.errors import ConfigError, EngineError, EngineLostError, EngineRequestError
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource

T = TypeVar("T")

_OK, _UNAUTHORISED = 200, 401
_NOT_WHOLE = "fduw"
"""Type codes of arrays that hold no whole numbers."""
_NO_IDS = b'"prompt_ids":[]'


class RemoteEngine:
    """Satisfies the `Engine` port over HTTP. Enter it with ``async with``, or call ``close`` at the end."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str,
        rank: int = 0,
        connect_timeout_s: float = 5.0,
        answer_timeout_s: float = 600.0,
    ) -> None:
        """Prepare to talk to a server; nothing is sent yet.

        Args:
            address: ``http://host:port`` of the server.
            api_key: the key it was started with.
            rank: which of its engines.
            connect_timeout_s: how long a connection may take to be made [seconds].
            answer_timeout_s: how long scoring, an update or a question about health may take [seconds]. A
                stream has no limit: how long a request waits for its turn is the queue's affair, and
                whether the server is alive is the router's.
        """
        self.address = address
        self._rank = rank
        self._name = f"{address} rank {rank}"
        self._instance_id = ""
        self._expected: EngineDescription | None = None
        headers = {
            "authorization": f"Bearer {api_key}",
            PROTOCOL_HEADER: str(PROTOCOL_VERSION),
        }
        self._lines = LineClient(address, headers=headers, connect_timeout_s=connect_timeout_s)
        self._client = httpx.AsyncClient(
            base_url=address,
            headers=headers,
            timeout=httpx.Timeout(answer_timeout_s, connect=connect_timeout_s),
            # An idle connection is given up before the server does it (after 5 s), or a request would now and
            # then meet a closed door.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0
            ),
            trust_env=False,  # a proxy for the web is none for a server in the next rack
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._lines.close()
        await self._client.aclose()

    async def describe(self) -> EngineDescription:
        """Return what the server serves.

        Raises:
            ConfigError: the key is wrong.
            EngineLostError: the server does not answer.
        """
        return await self._ask("GET", "/v1/engine", EngineDescription)

    def expect(self, description: EngineDescription) -> None:
        """Hold every start of the server to this: weights tell neither how a model attends nor how it rounds."""
        self._expected = description

    # The Engine port -------------------------------------------------------------------------

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Sample one completion; see `longarc.records.ports.Engine`."""
        body = _stream_body(prompt_ids, sampling, session_id=session_id, rank=self._rank)
        with _network(self._name):
            async with self._lines.post("/v1/stream", body) as reply:
                if reply.status != _OK:
                    raise self._error(reply.status, await reply.read())
                self._check_instance(reply.headers)
                async for line in reply.lines():
                    piece = self._read(SampledTokens, line)
                    if piece.finish_reason is not None:
                        reply.is_as_good_as_over()
                    yield piece
                    if piece.finish_reason is not None:
                        return
        raise EngineLostError(f"{self._name}: the stream ended before the completion")

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats]; 0.0 for the first token."""
        body = ScoreRequest(
            token_ids=tuple(whole_ids("token ids", token_ids)),
            temperature=temperature,
            rank=self._rank,
        )
        reply = await self._ask("POST", "/v1/score", ScoreReply, body)
        return list(reply.logprobs)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Let the server load a file that it can read too; returns when the new weights are in use."""
        body = UpdateRequest(
            source=_absolute(source), policy_version=policy_version, rank=self._rank
        )
        await self._ask("POST", "/v1/update_weights", UpdateReply, body)

    async def health(self) -> EngineHealth:
        """Ask the server; what it answers says which start of it the next requests are meant for.

        Raises:
            EngineLostError: it does not answer, or serves something else since it was started anew.
        """
        health = await self._ask("GET", f"/v1/health?rank={self._rank}", EngineHealth)
        if self._expected is not None and health.instance_id != self._instance_id:
            change = _change(self._expected, await self.describe())
            if change is not None:
                raise EngineLostError(
                    f"{self._name} was started anew and {change}; start it as it was before"
                )
        self._instance_id = health.instance_id
        return health

    # Parts of them ---------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, kind: type[T], body: object = None) -> T:
        with _network(self._name):
            response = await self._client.request(
                method, path, content=None if body is None else dumps(body)
            )
        if response.status_code != _OK:
            raise self._error(response.status_code, response.content)
        self._check_instance(response.headers)
        return self._read(kind, response.content)

    def _read(self, kind: type[T], data: bytes) -> T:
        """Return what the server said, or raise the error that it is."""
        error = error_of(data, source=self._name)
        if error is not None:
            raise error
        try:
            return loads(kind, data)
        except EngineRequestError as cause:
            raise EngineLostError(f"{self._name} answers in an unknown way: {cause}") from cause

    def _error(self, status: int, body: bytes) -> EngineError | ConfigError:
        if status == _UNAUTHORISED:
            return ConfigError(
                f"{self._name} refuses the key; give LONGARC_ENGINE_KEY the value that the server has"
            )
        error = error_of(body, source=self._name)
        return error or EngineLostError(
            f"{self._name} answered {status} {body[:200]!r}: is it an engine server?"
        )

    def _check_instance(self, headers: Mapping[str, str]) -> None:
        """Refuse an answer of a server that was started anew since it was last asked for its health."""
        shown = headers.get(INSTANCE_HEADER, "")
        if shown and self._instance_id and shown != self._instance_id:
            raise EngineLostError(
                f"{self._name} was started anew: its weights may be others. Ask for its health first"
            )


def _stream_body(
    prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str, rank: int
) -> bytes:
    """Return the body of a request; ids in an array are written as they lie there, which matters for long prompts."""
    is_fast = isinstance(prompt_ids, array) and prompt_ids.typecode not in _NOT_WHOLE
    request = StreamRequest(
        prompt_ids=() if is_fast else tuple(whole_ids("prompt ids", prompt_ids)),
        sampling=sampling,
        session_id=session_id,
        rank=rank,
    )
    body = dumps(request)
    if not isinstance(prompt_ids, array) or not is_fast:
        return body
    ids = orjson.dumps(
        np.frombuffer(prompt_ids, prompt_ids.typecode), option=orjson.OPT_SERIALIZE_NUMPY
    )
    before, _, after = body.partition(_NO_IDS)
    return b"".join((before, _NO_IDS[:-2], ids, after))


def _change(before: EngineDescription, now: EngineDescription) -> str | None:
    """Say what a server serves otherwise than before; None where who sampled there can go on."""
    for name in ("attention", "weight_quantisation", "cache_quantisation"):
        was, found = getattr(before, name), getattr(now, name)
        if was != found:
            return f"has {name}={found!r} now, it had {was!r}"
    if before.model != now.model:
        keys = {*before.model, *now.model}
        key = min(key for key in keys if before.model.get(key) != now.model.get(key))
        return f"serves another model: {key} is {now.model.get(key)!r} now, it was {before.model.get(key)!r}"
    if before.records_routing not in ("none", now.records_routing):
        return f"has records_routing={now.records_routing!r} now, {before.records_routing!r} is asked of it"
    for name in ("max_context_tokens", "num_ranks"):
        was, found = getattr(before, name), getattr(now, name)
        if found < was:
            return f"has {name}={found} now, it had {was}"
    return None


def _absolute(source: WeightSource) -> WeightSource:
    """Name the file so that it is found from the server's working directory too."""
    return replace(source, path=str(Path(source.path).absolute()))


@contextmanager
def _network(name: str) -> Iterator[None]:
    """Turn what the network does into `EngineLostError`."""
    try:
        yield
    except (httpx.HTTPError, LineClientError) as error:
        raise EngineLostError(
            f"{name} cannot be reached: {type(error).__name__} {error}".rstrip()
        ) from error
