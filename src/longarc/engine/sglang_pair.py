"""Two SGLang servers, one of which prefills for the other. Written to its documentation; never run against real ones.

::

                 +--> prefill server: computes the prompt, samples the first token --cache--+
    /generate ---+         (same body, same bootstrap_room)                                 v
                 +--> decode server: waits for the cache, samples the rest -------------> answer

Sources, of SGLang 0.5: docs/advanced_features/pd_disaggregation and server_arguments (``--disaggregation-mode``,
``--disaggregation-bootstrap-port``), and SGLang's own small router, sgl-router/py_src/sglang_router/mini_lb.py,
for ``bootstrap_host``, ``bootstrap_port``, ``bootstrap_room`` and where log-probabilities of a prompt are.

An update waits until nothing is in flight (``on_update = "finish"`` is required): the first token is sampled by
the prefill server, and no documentation says whose version the decode server then reports for it.
"""

import asyncio
import contextlib
import ipaddress
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from longarc.engine.pair import InFlight, both, joint_counts, with_cached_tokens
from longarc.engine.pieces import Chunk
from longarc.engine.served import ServerCounts, ServerRequest
from longarc.engine.sglang import (
    SglangServer,
    completion_body,
    read_chunks,
    read_scores,
    score_body,
)
from longarc.errors import ConfigError, EngineError, boundary
from longarc.records.sampling import Sampling


class SglangPair:
    """A prefill server and a decode server that answer as one."""

    name = "SGLang"

    def __init__(
        self,
        prefill: SglangServer,
        decode: SglangServer,
        *,
        bootstrap_host: str,
        bootstrap_port: int,
    ) -> None:
        """Let ``prefill`` hand its cache over at ``bootstrap_host:bootstrap_port``, where ``decode`` reaches it."""
        self._prefill, self._decode = prefill, decode
        self._bootstrap = {"bootstrap_host": bootstrap_host, "bootstrap_port": bootstrap_port}
        self._in_flight = InFlight()
        self._version: int | None = None

    @classmethod
    async def found(
        cls,
        prefill: SglangServer,
        decode: SglangServer,
        *,
        prefill_url: str,
        deterministic: bool | None,
    ) -> Self:
        """Ask both servers how they were started, and pair them.

        Args:
            prefill: computes prompts.
            decode: samples.
            prefill_url: address of ``prefill``, whose host ``decode`` is told.
            deterministic: see ``SglangServer.check``.

        Raises:
            ConfigError: one was started in a way LongArc cannot use, or does not have the part it is given.
        """
        await decode.check(deterministic=deterministic, mode="decode")
        info = await prefill.check(deterministic=deterministic, mode="prefill")
        port = info.get("disaggregation_bootstrap_port")
        if not isinstance(port, int):
            raise ConfigError(
                f"the SGLang server at {prefill.http.where} does not say its disaggregation_bootstrap_port "
                f"({port!r}): start it with --disaggregation-bootstrap-port"
            )
        return cls(prefill, decode, bootstrap_host=_host_of(prefill_url), bootstrap_port=port)

    async def label(self, policy_version: int) -> None:
        """Say which version the weights they started with are."""
        await self._prefill.label(policy_version)
        await self._decode.label(policy_version)
        self._version = policy_version

    def refusal(self, sampling: Sampling) -> str | None:
        """Say why this cannot be sampled; None where it can."""
        return self._decode.refusal(sampling)

    async def chunks(self, request: ServerRequest) -> AsyncGenerator[Chunk]:
        """Sample one completion; a request that fails or is left at one server is aborted at both."""
        body = {**completion_body(request), **self._meeting()}
        num_cached_tokens = 0

        async def answers() -> AsyncGenerator[Mapping[str, Any]]:
            nonlocal num_cached_tokens
            async with contextlib.aclosing(self._decode.answers(body)) as decoded:
                # Nothing is decoded before the prefill has ended, so to wait for both here costs nothing.
                num_cached_tokens, first = await both(self._prefilled(body), _first(decoded))
                if first is not None:
                    yield first
                async for answer in decoded:
                    yield answer

        async def abort() -> None:
            # At the same time: one of them may not answer any more.
            async with asyncio.TaskGroup() as tasks:
                for server in (self._prefill, self._decode):
                    tasks.create_task(server.abort(request.request_id))

        with self._in_flight.one():
            async with contextlib.aclosing(read_chunks(answers(), abort)) as chunks:
                async for chunk in chunks:
                    yield with_cached_tokens(chunk, num_cached_tokens)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats] for i >= 1, preceded by 0.0, as the prefill server computes it."""
        body = {**score_body(token_ids), **self._meeting()}
        with self._in_flight.one():
            prefilled, decoded = await both(
                self._prefill.http.post("/generate", body),
                self._decode.http.post("/generate", body),
            )
        with boundary(EngineError, "SGLang's scores cannot be read"):
            # What the decode server has of them follows, as SGLang's own router puts them together.
            joined = [
                *prefilled["meta_info"]["input_token_logprobs"],
                *(decoded["meta_info"].get("input_token_logprobs") or ()),
            ]
        return read_scores(token_ids, {"meta_info": {"input_token_logprobs": joined}})

    async def update(self, path: str, *, policy_version: int) -> None:
        """Put a weight file in use at both once nothing is in flight; see `longarc.engine.served.EngineServer`."""
        await self._in_flight.none_left()
        await self._prefill.send(path, policy_version, flush_cache=True)
        await self._decode.send(path, policy_version, flush_cache=True)
        self._version = policy_version

    async def counts(self) -> ServerCounts:
        """Return the counters of both."""
        return joint_counts(*await both(self._prefill.counts(), self._decode.counts()))

    def _meeting(self) -> dict[str, Any]:
        """Return where the cache of one request changes hands; no two requests of anybody may share a room."""
        return {**self._bootstrap, "bootstrap_room": secrets.randbits(63)}

    async def _prefilled(self, body: Mapping[str, Any]) -> int:
        """Have a prompt computed by the weights that will decode; return how many tokens of it were cached."""
        answer = await self._prefill.http.post("/generate", {**body, "stream": False})
        _refuse_error(answer, "prefill")
        with boundary(EngineError, f"SGLang's prefill cannot be read: {str(answer)[:200]}"):
            meta = answer["meta_info"]
            reason = (meta["finish_reason"] or {}).get("type")
            version, num_cached_tokens = meta["weight_version"], int(meta.get("cached_tokens") or 0)
        if reason == "abort":
            raise EngineError(
                "SGLang's prefill server aborted a request: somebody else did, or it failed"
            )
        if version != str(self._version):
            raise EngineError(
                f"SGLang's prefill server has weights {version!r}, the decode server has {self._version}: was one "
                f"of them started again, or does somebody else update them?"
            )
        return num_cached_tokens


async def _first(answers: AsyncGenerator[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    answer = await anext(answers, None)
    if answer is not None:
        _refuse_error(answer, "decode")
    return answer


def _refuse_error(answer: Mapping[str, Any], part: str) -> None:
    """Raise what a server says in place of an answer, at once: the other one would wait for it."""
    if "error" in answer:
        raise EngineError(f"SGLang's {part} server: {answer['error']}")


def _host_of(url: str) -> str:
    """Return the host of an address as the decode server is told it: IPv6 in brackets."""
    host = urlsplit(url).hostname or ""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return f"[{host}]"
