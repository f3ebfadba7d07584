"""vLLM in the words of its HTTP API: ids in, ids out, and weights swapped between two steps.

Written against vLLM 0.32.0. What of it is used:

====================================  =======================================================================
``POST /inference/v1/generate``       prompt ids in; ids, log-probabilities and spans of weight versions out
``POST /pause``, ``/resume``          stop between two steps; running sequences are kept, or run out first
``POST /collective_rpc``              calls `vllm_worker.WeightLoader`, which loads a file
``POST /reset_prefix_cache``          with running sequences: they compute their cache again
``POST /update_weight_version``       the label that the spans name
``GET /metrics``, ``/server_info``    counters; what a server that runs already was started with
====================================  =======================================================================

The server has to run with ``--logprobs-mode processed_logprobs``: only these are of the distribution that was
sampled from. What runs where: docs/guides/engine-servers.md.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from longarc.config.engine_clients import LEAST_VLLM_TEMPERATURE
from longarc.engine.http_json import HttpJson, prometheus
from longarc.engine.pieces import Chunk, Ending, VersionSpan, raw_logprobs_are_free
from longarc.engine.served import (
    BrokenServerError,
    ServerCounts,
    ServerRequest,
    finite,
)
from longarc.errors import ConfigError, EngineError, boundary
from longarc.records.sampling import FinishReason, Sampling, UpdatePolicy

LOADER = "longarc_vllm_worker.WeightLoader"
"""``--worker-extension-cls`` of a server whose weights LongArc updates: a copy of ``vllm_worker.py``."""
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
_PAUSE_MODES: Mapping[UpdatePolicy, str] = {
    "continue": "keep",
    "recompute": "keep",
    "finish": "wait",
}
_COUNTERS = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:generation_tokens_total": "num_sampled_tokens",
    "vllm:prompt_tokens_total": "num_prompt_tokens",
    "vllm:prompt_tokens_cached_total": "num_cached_tokens",
}


class VllmServer:
    """One vLLM server that answers."""

    name = "vLLM"

    def __init__(self, http: HttpJson, *, on_update: UpdatePolicy) -> None:
        """Speak with the server behind ``http``, and treat running sequences as ``on_update`` says."""
        self.http = http
        self._on_update: UpdatePolicy = on_update

    async def is_up(self) -> bool:
        """Whether it answers."""
        try:
            await self.http.text("/health")
        except EngineError:
            return False
        return True

    async def check(self, *, transfers_cache: bool = False) -> None:
        """Refuse a server that was started in a way LongArc cannot use.

        Args:
            transfers_cache: whether it has to hand its cache over, or take that of another server.

        Raises:
            ConfigError: an argument is missing or has another value.
        """
        info = await self.http.get("/server_info?config_format=json")
        config = info["vllm_config"]
        if transfers_cache and not config.get("kv_transfer_config"):
            raise ConfigError(
                f"the vLLM server at {self.http.where} has no KV connector, and would compute prompts itself: start "
                f'it with --kv-transfer-config \'{{"kv_connector":"NixlConnector","kv_role":"kv_both"}}\', or leave '
                f"engine.prefill_url (--prefill) out"
            )
        mode = config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ConfigError(
                f"the vLLM server at {self.http.where} has --logprobs-mode {mode}: its log-probabilities are not of the distribution "
                f"it samples from. Start it with --logprobs-mode processed_logprobs"
            )

    async def label(self, policy_version: int) -> None:
        """Say which version the weights it started with are."""
        await self.http.post("/update_weight_version", {"new_version": str(policy_version)})

    def refusal(self, sampling: Sampling) -> str | None:
        """Say why this cannot be sampled; None where it can."""
        if 0 < sampling.temperature < LEAST_VLLM_TEMPERATURE:
            return (
                f"samples at temperature {LEAST_VLLM_TEMPERATURE} where {sampling.temperature} is asked; use 0 for "
                f"the most likely token, or at least {LEAST_VLLM_TEMPERATURE}"
            )
        if sampling.stop_strings:
            return (
                f"runs without a tokenizer and cannot look for stop_strings={list(sampling.stop_strings)}; "
                f"use stop_ids"
            )
        if sampling.returns_raw_logprobs and not raw_logprobs_are_free(sampling):
            return (
                "has one kind of log-probabilities, those of the distribution sampled from; leave "
                "returns_raw_logprobs out, or sample at temperature 1 without truncation"
            )
        return None

    async def chunks(self, request: ServerRequest) -> AsyncGenerator[Chunk]:
        """Sample one completion: as one chunk, or one a token where pieces of it are wanted early."""
        is_streamed = bool(request.sampling.stream_interval_tokens)
        async with contextlib.aclosing(
            self.sample(completion_body(request), is_streamed=is_streamed)
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    async def sample(self, body: Mapping[str, Any], *, is_streamed: bool) -> AsyncGenerator[Chunk]:
        """Sample what a body of `completion_body` asks for."""
        if not is_streamed:
            answer = await self.http.post("/inference/v1/generate", body)
            yield _chunk(answer["choices"][0], answer.get("usage"))
            return
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        held: dict[str, Any] | None = None
        async with contextlib.aclosing(self.http.events("/inference/v1/generate", body)) as events:
            async for event in events:
                if "error" in event:
                    raise EngineError(f"vLLM: {event['error'].get('message', event['error'])}")
                if held is not None:
                    # The usage follows the last tokens, in an event of its own.
                    yield _chunk(held, event.get("usage"))
                    held = None
                elif event["choices"]:
                    choice = event["choices"][0]
                    if choice["finish_reason"] is None:
                        yield _chunk(choice, None)
                    else:
                        held = choice
        if held is not None:
            yield _chunk(held, None)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats] for i >= 1, preceded by 0.0; never from the prefix cache."""
        body = {
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        answer = await self.http.post("/inference/v1/generate", body)
        scored = zip(token_ids, answer["prompt_logprobs"], strict=True)
        return [
            0.0 if entry is None else finite(entry[str(token_id)]["logprob"])
            for token_id, entry in scored
        ]

    async def update(self, path: str, *, policy_version: int) -> None:
        """Put a weight file in use between two steps; see `longarc.engine.served.EngineServer`."""
        async with self.paused(policy_version):
            await self.load(path, policy_version)
            with or_broken(policy_version):
                if self._on_update == "recompute":
                    await self.http.post(
                        "/reset_prefix_cache", query={"reset_running_requests": "true"}
                    )
                await self.label(policy_version)

    @contextlib.asynccontextmanager
    async def paused(self, policy_version: int) -> AsyncIterator[None]:
        """Stop between two steps, and go on when the block ends, for an update to ``policy_version``."""
        await self.http.post("/pause", query={"mode": _PAUSE_MODES[self._on_update]})
        try:
            yield
        finally:
            with or_broken(policy_version):
                await self.http.post("/resume")

    async def load(self, path: str, policy_version: int) -> None:
        """Load a weight file while the server is paused; see `longarc.engine.served.EngineServer.update`."""
        try:
            answer = await self.http.post(
                "/collective_rpc", {"method": "longarc_load_weights", "args": [path]}
            )
        except EngineError as error:
            raise BrokenServerError(
                f"weights {policy_version} were not loaded: {error}. A server that was started without "
                f"--worker-extension-cls {LOADER} cannot load any"
            ) from error
        # One answer a rank: all have the new weights, or all the old ones, or the server is broken.
        errors = [one for one in answer["results"] if "error" in one]
        if not errors:
            return
        what = f"weights {policy_version} were not loaded: {errors[0]['error']}"
        if len(errors) < len(answer["results"]) or any("is_broken" in one for one in errors):
            raise BrokenServerError(f"{what}; and the old ones are not in use everywhere any more")
        raise EngineError(what)

    async def counts(self) -> ServerCounts:
        """Return its counters."""
        return ServerCounts(**prometheus(await self.http.text("/metrics"), _COUNTERS))


@contextlib.contextmanager
def or_broken(policy_version: int) -> Iterator[None]:
    """What fails here fails while the server is stopped, with weights that it does not call by their version."""
    try:
        yield
    except EngineError as error:
        raise BrokenServerError(
            f"vLLM did not go on with weights {policy_version}: {error}"
        ) from error


def completion_body(request: ServerRequest) -> dict[str, Any]:
    """Return the JSON that asks for a completion."""
    return {
        "token_ids": list(request.prompt_ids),
        "request_id": request.request_id,
        "cache_salt": request.cache_salt,
        "sampling_params": _sampling_params(request.sampling, request.seed),
    }


def _sampling_params(sampling: Sampling, seed: int) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_ids),
        # The model's own end of text is a stop id only where the recipe says so.
        "ignore_eos": True,
        "seed": seed,
        "logprobs": 0,
        "detokenize": False,
    }


def _chunk(choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> Chunk:
    with boundary(EngineError, f"vLLM's answer cannot be read: {str(choice)[:200]}"):
        return _read_chunk(choice, usage)


def _read_chunk(choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> Chunk:
    token_ids = choice["token_ids"] or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if [entry["token_id"] for entry in content] != token_ids:
        raise EngineError(
            f"vLLM sent log-probabilities of {[entry['token_id'] for entry in content]} with tokens {token_ids}"
        )
    reason = choice["finish_reason"]
    return Chunk(
        token_ids=token_ids,
        logprobs=[finite(entry["logprob"]) for entry in content],
        kept_ids=[tuple(sorted(ids)) for ids in choice.get("sampling_mask") or ()],
        ending=None if reason is None else _ending(reason, choice, usage),
    )


def _ending(reason: str, choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> Ending:
    if reason not in _FINISH_REASONS:
        raise EngineError(
            f"vLLM ended a completion with {reason!r}: somebody else aborted it, or the server failed"
        )
    details = (usage or {}).get("prompt_tokens_details") or {}
    return Ending(
        finish_reason=_FINISH_REASONS[reason],
        spans=[version_span(span) for span in choice["weight_versions"] or ()],
        num_cached_tokens=details.get("cached_tokens") or 0,
    )


def version_span(span: Mapping[str, Any]) -> VersionSpan:
    """Read one entry of ``weight_versions``.

    Raises:
        EngineError: it names weights that LongArc did not put there.
    """
    if not str(span["version"]).isdecimal():
        raise EngineError(
            f"vLLM sampled with weights of version {span['version']!r}, which LongArc did not put there; "
            f"does somebody else update this server?"
        )
    return VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"])
