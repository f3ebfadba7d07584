"""Two vLLM servers, one of which prefills for the other. Written to vLLM 0.32.0; never run against real ones.

::

    prompt --do_remote_decode--> prefill server --> kv_transfer_params
    prompt --kv_transfer_params (do_remote_prefill)--> decode server <--cache-- prefill server

Sources, of vLLM 0.32.0: docs/features/nixl_connector_usage and disagg_prefill; its example of a proxy,
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py, for the handshake; ``kv_transfer_params`` is a field of
``/inference/v1/generate`` in request and answer (entrypoints/scale_out/token_in_token_out/protocol.py).

The prefill server samples one token because it has to sample something; nobody uses it. The decode server computes
the last token of the prompt again and samples all tokens of the completion, so the versions that it reports are of
the weights that sampled them, also where the cache comes from the weights before (``on_update = "continue"``).
"""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from longarc.engine.pair import InFlight, both, joint_counts, with_cached_tokens
from longarc.engine.pieces import Chunk
from longarc.engine.served import BrokenServerError, ServerCounts, ServerRequest
from longarc.engine.vllm import VllmServer, completion_body, or_broken, version_span
from longarc.errors import EngineError, WeightMismatchError, boundary
from longarc.records.sampling import Sampling, UpdatePolicy

_REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Asks a server to keep the cache of a prompt for another one."""


class VllmPair:
    """A prefill server and a decode server that answer as one."""

    name = "vLLM"

    def __init__(
        self,
        prefill: VllmServer,
        decode: VllmServer,
        *,
        on_update: UpdatePolicy,
        max_mean_gap: float,
    ) -> None:
        """Pair two servers whose scores of a text differ by ``max_mean_gap`` [nats] at most on average."""
        self._prefill, self._decode = prefill, decode
        self._on_update: UpdatePolicy = on_update
        self._bound = max_mean_gap
        self._in_flight = InFlight()
        self._version = 0

    async def check(self) -> None:
        """Refuse servers that were started in a way LongArc cannot use.

        Raises:
            ConfigError: an argument is missing or has another value.
        """
        await self._decode.check(transfers_cache=True)
        await self._prefill.check(transfers_cache=True)

    async def label(self, policy_version: int) -> None:
        """Say which version the weights they started with are."""
        await self._prefill.label(policy_version)
        await self._decode.label(policy_version)
        self._version = policy_version

    def refusal(self, sampling: Sampling) -> str | None:
        """Say why this cannot be sampled; None where it can."""
        return self._decode.refusal(sampling)

    async def chunks(self, request: ServerRequest) -> AsyncGenerator[Chunk]:
        """Sample one completion. Leaving it closes the connection of the server at which it is."""
        body = completion_body(request)
        with self._in_flight.one():
            params, num_cached_tokens = await self._prefilled(body)
            sampled = self._decode.sample(
                {**body, "kv_transfer_params": params},
                is_streamed=bool(request.sampling.stream_interval_tokens),
            )
            async with contextlib.aclosing(sampled) as chunks:
                async for chunk in chunks:
                    yield with_cached_tokens(chunk, num_cached_tokens)

    async def _prefilled(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """Compute a prompt's cache; return where the decode server finds it, and how many tokens were there before."""
        oldest = self._version
        answer = await self._prefill.http.post(
            "/inference/v1/generate",
            {
                **body,
                # One token, whichever it is.
                "sampling_params": {
                    **body["sampling_params"],
                    "max_tokens": 1,
                    "stop_token_ids": [],
                },
                "kv_transfer_params": _REMOTE_DECODE,
            },
        )
        with boundary(EngineError, f"vLLM's prefill cannot be read: {str(answer)[:200]}"):
            spans = [version_span(span) for span in answer["choices"][0]["weight_versions"] or ()]
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            params: Mapping[str, Any] = answer.get("kv_transfer_params") or {}
            num_cached_tokens = int(details.get("cached_tokens") or 0)
        if not params.get("do_remote_prefill"):
            raise EngineError(
                f"vLLM's prefill server kept no cache for the decode server (kv_transfer_params={dict(params)}): "
                f"its KV connector must be one that hands over through these, such as NixlConnector"
            )
        if not all(oldest <= span.version <= self._version for span in spans):
            raise EngineError(
                f"vLLM's prefill server has weights {[span.version for span in spans]}, the decode server has "
                f"{self._version}: was one of them started again, or does somebody else update them?"
            )
        return params, num_cached_tokens

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats] for i >= 1, preceded by 0.0, as the decode server computes it.

        Raises:
            WeightMismatchError: the prefill server computes something else.
        """
        with self._in_flight.one():
            prefilled, decoded = await both(
                self._prefill.score(token_ids), self._decode.score(token_ids)
            )
        gaps = [abs(a - b) for a, b in zip(prefilled, decoded, strict=True)]
        if not sum(gaps) / len(gaps) <= self._bound:
            raise WeightMismatchError(
                f"vLLM's two servers compute different models: their log-probabilities of {len(gaps)} tokens differ "
                f"by {sum(gaps) / len(gaps):.4g} nats on average, allowed are {self._bound:.4g} "
                f"(engine.max_probe_gap)"
            )
        return decoded

    async def update(self, path: str, *, policy_version: int) -> None:
        """Put a weight file in use at both while both are stopped; see `longarc.engine.served.EngineServer`.

        One after the other: what the first refuses leaves the old weights in use at both.
        """
        if self._on_update == "finish":
            # A request between the two servers is at neither, so neither can wait for it.
            await self._in_flight.none_left()
        async with self._prefill.paused(policy_version), self._decode.paused(policy_version):
            await self._prefill.load(path, policy_version)
            try:
                await self._decode.load(path, policy_version)
            except EngineError as error:
                raise BrokenServerError(
                    f"vLLM's prefill server has weights {policy_version} and its decode server has not: {error}"
                ) from error
            with or_broken(policy_version):
                await self._prefill.label(policy_version)
                await self._decode.label(policy_version)
            self._version = policy_version

    async def counts(self) -> ServerCounts:
        """Return the counters of both."""
        return joint_counts(*await both(self._prefill.counts(), self._decode.counts()))
