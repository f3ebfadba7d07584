"""SGLang in the words of its HTTP API. Written to its documentation; never run against a real server.

Sources: docs/basic_usage/native_api, sampling_params and docs/advanced_features/sglang_for_rl of SGLang 0.5.

=====================================  ======================================================================
``POST /generate``                     ``input_ids`` in; ``meta_info.output_token_logprobs`` out
``POST /abort_request``                ends a request whose reader has gone
``POST /pause_generation`` and back    ``in_place`` keeps running sequences, ``retract`` computes them again
``POST /update_weights_from_...``      `longarc.engine.sglang_weights`
``POST /update_weight_version``        the label that ``meta_info.weight_versions`` names
``GET /metrics``, ``/get_server_info`` counters (with ``--enable-metrics``); what it was started with
=====================================  ======================================================================

Its log-probabilities are of the distribution at the temperature, before top-p, top-k and min-p: requests with
these are refused. A server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 reports those at temperature 1 instead, which
the probe finds.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from longarc.engine.http_json import HttpJson, prometheus
from longarc.engine.pair import InFlight
from longarc.engine.pieces import Chunk, Ending, VersionSpan, raw_logprobs_are_free
from longarc.engine.served import BrokenServerError, ServerCounts, ServerRequest, finite
from longarc.errors import ConfigError, EngineError, boundary
from longarc.records.sampling import FinishReason, Sampling, UpdatePolicy

_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
_COUNTERS = {
    "sglang:num_running_reqs": "num_running",
    "sglang:num_queue_reqs": "num_waiting",
    "sglang:generation_tokens_total": "num_sampled_tokens",
    "sglang:prompt_tokens_total": "num_prompt_tokens",
    "sglang:cached_tokens_total": "num_cached_tokens",
}


class WeightTransport(Protocol):
    """One way to hand a weight file over."""

    async def send(self, path: str, *, policy_version: int, flush_cache: bool) -> Any:
        """Hand the file over and return what the server answers.

        Raises:
            EngineError: the server cannot be reached or refuses, or the file cannot be read.
        """
        ...


class SglangServer:
    """One SGLang server that answers."""

    name = "SGLang"

    def __init__(
        self, http: HttpJson, transport: WeightTransport, *, on_update: UpdatePolicy
    ) -> None:
        self.http = http
        self._transport = transport
        self._on_update: UpdatePolicy = on_update
        self._in_flight = InFlight()

    async def is_up(self) -> bool:
        """Whether it answers."""
        try:
            await self.http.text("/health")
        except EngineError:
            return False
        return True

    async def check(
        self, *, deterministic: bool | None, mode: Literal["null", "prefill", "decode"] = "null"
    ) -> Mapping[str, Any]:
        """Refuse a server that was started in a way LongArc cannot use; return what it was started with.

        Args:
            deterministic: whether it has to sample what seeds say, or must not spend time on it; None is either.
            mode: its part where prefill and decode are apart.

        Raises:
            ConfigError: an argument is missing or has another value.
        """
        info: Mapping[str, Any] = await self.http.get("/get_server_info")
        found = info.get("disaggregation_mode", "null")
        if found != mode:
            raise ConfigError(
                f"the SGLang server at {self.http.where} has --disaggregation-mode {found}, it needs {mode}: "
                f"engine.url (--upstream) names the server that decodes, engine.prefill_url (--prefill) the one that "
                f"prefills, and a server that does both is named by the first alone"
            )
        wanted = {"enable_metrics": True}
        if deterministic is not None:
            wanted["enable_deterministic_inference"] = deterministic
        for key, value in wanted.items():
            if info.get(key, False) != value:
                raise ConfigError(
                    f"the SGLang server at {self.http.where} has {key}={info.get(key, False)}, it needs {value}: start it "
                    f"{'with' if value else 'without'} --{key.replace('_', '-')}"
                )
        return info

    async def label(self, policy_version: int) -> None:
        """Say which version the weights it started with are."""
        await self.http.post(
            "/update_weight_version",
            {"new_version": str(policy_version), "abort_all_requests": False},
        )

    def refusal(self, sampling: Sampling) -> str | None:
        """Say why this cannot be sampled; None where it can."""
        if sampling.is_truncated:
            return (
                f"reports log-probabilities before top_p={sampling.top_p}, top_k={sampling.top_k} and "
                f"min_p={sampling.min_p} leave tokens out; sample with the temperature alone, or use vLLM"
            )
        if sampling.stop_strings:
            return (
                f"runs without a tokenizer and cannot look for stop_strings={list(sampling.stop_strings)}; "
                f"use stop_ids"
            )
        if sampling.returns_raw_logprobs and not raw_logprobs_are_free(sampling):
            return (
                "has one kind of log-probabilities, those at the sampling temperature; leave "
                "returns_raw_logprobs out, or sample at temperature 1"
            )
        return None

    async def chunks(self, request: ServerRequest) -> AsyncGenerator[Chunk]:
        """Sample one completion: as one chunk, or several where pieces of it are wanted early."""

        async def abort() -> None:
            await self.abort(request.request_id)

        with self._in_flight.one():
            answers = self.answers(completion_body(request))
            async with contextlib.aclosing(read_chunks(answers, abort)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def answers(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        """Yield the answer to ``/generate``, or the events of its stream."""
        if not body["stream"]:
            yield await self.http.post("/generate", body)
            return
        async with contextlib.aclosing(self.http.events("/generate", body)) as events:
            async for event in events:
                yield event

    async def abort(self, request_id: str) -> None:
        """End a request if it is still there."""
        with contextlib.suppress(EngineError):
            await self.http.post("/abort_request", {"rid": request_id})

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats] for i >= 1, preceded by 0.0."""
        with self._in_flight.one():
            answer = await self.http.post("/generate", score_body(token_ids))
        return read_scores(token_ids, answer)

    async def update(self, path: str, *, policy_version: int) -> None:
        """Put a weight file in use; see `longarc.engine.served.EngineServer`."""
        if self._on_update == "finish":
            await self._in_flight.none_left()
            await self.send(path, policy_version, flush_cache=True)
            return
        keeps_cache = self._on_update == "continue"
        await self.http.post(
            "/pause_generation", {"mode": "in_place" if keeps_cache else "retract"}
        )
        try:
            await self.send(path, policy_version, flush_cache=not keeps_cache)
        finally:
            try:
                await self.http.post("/continue_generation", {})
            except EngineError as error:
                raise BrokenServerError(
                    f"SGLang did not go on after the update to weights {policy_version}: {error}"
                ) from error

    async def send(self, path: str, policy_version: int, *, flush_cache: bool) -> None:
        """Hand a weight file over.

        Raises:
            BrokenServerError: it failed. Nothing promises that what failed half-way left the old weights.
        """
        try:
            answer = await self._transport.send(
                path, policy_version=policy_version, flush_cache=flush_cache
            )
        except EngineError as error:
            raise BrokenServerError(
                f"weights {policy_version} did not reach SGLang, and which it has now is unknown: {error}"
            ) from error
        if not (isinstance(answer, Mapping) and answer.get("success")):
            raise BrokenServerError(
                f"SGLang refused weights {policy_version}, and which it has now is unknown: {answer}"
            )

    async def counts(self) -> ServerCounts:
        """Return its counters."""
        return ServerCounts(**prometheus(await self.http.text("/metrics"), _COUNTERS))


def completion_body(request: ServerRequest) -> dict[str, Any]:
    """Return the JSON that asks for a completion."""
    return {
        "input_ids": list(request.prompt_ids),
        "rid": request.request_id,
        "extra_key": request.cache_salt,
        "sampling_params": _sampling_params(request.sampling, request.seed),
        "return_logprob": True,
        "stream": bool(request.sampling.stream_interval_tokens),
    }


def score_body(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the JSON that asks for the log-probabilities of a prompt."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


async def read_chunks(
    answers: AsyncGenerator[Mapping[str, Any]], abort: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Chunk]:
    """Yield what is new in each answer; ``abort`` what is left before its end."""
    is_over = False
    try:
        async with contextlib.aclosing(answers):
            num_seen = 0
            async for answer in answers:
                chunk, num_seen = _chunk(answer, num_seen)
                is_over = chunk.ending is not None
                yield chunk
    finally:
        if not is_over:
            # The server notices a closed connection only when it next writes to it.
            await abort()


def read_scores(token_ids: Sequence[int], answer: Mapping[str, Any]) -> list[float]:
    """Return log p(token[i] | token[:i]) [nats] for i >= 1, preceded by 0.0, from an answer to `score_body`.

    Raises:
        EngineError: the answer is of other tokens, or cannot be read.
    """
    with boundary(EngineError, "SGLang's scores cannot be read"):
        scored = answer["meta_info"]["input_token_logprobs"]
        ids = [entry[1] for entry in scored]
    if ids != list(token_ids):
        raise EngineError(f"SGLang scored {ids}, asked was {list(token_ids)}")
    return [0.0, *(finite(entry[0]) for entry in scored[1:])]


def _sampling_params(sampling: Sampling, seed: int) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        # The model's own end of text is a stop id only where the recipe says so.
        "ignore_eos": True,
        "no_stop_trim": True,
        "sampling_seed": seed,
    }


def _chunk(answer: Mapping[str, Any], num_seen: int) -> tuple[Chunk, int]:
    """Return what is new in an answer, and how many tokens have been seen with it.

    An event of a stream lists all tokens so far, or the new ones only, as the server was started; the total
    length tells which.
    """
    if "error" in answer:
        raise EngineError(f"SGLang: {answer['error']}")
    with boundary(EngineError, f"SGLang's answer cannot be read: {str(answer)[:200]}"):
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        total = meta.get("output_token_logprobs_length", len(entries))
        new = entries[num_seen - (total - len(entries)) :]
        reason = meta["finish_reason"]
        chunk = Chunk(
            token_ids=[entry[1] for entry in new],
            logprobs=[finite(entry[0]) for entry in new],
            ending=None if reason is None else _ending(reason["type"], meta),
        )
    return chunk, total


def _ending(reason: str, meta: Mapping[str, Any]) -> Ending:
    if reason not in _FINISH_REASONS:
        raise EngineError(
            f"SGLang ended a completion with {reason!r}: somebody else aborted it, or the server failed"
        )
    spans = meta.get("weight_versions")
    return Ending(
        finish_reason=_FINISH_REASONS[reason],
        spans=None if spans is None else [_span(span) for span in spans],
        num_cached_tokens=meta.get("cached_tokens") or 0,
    )


def _span(span: Mapping[str, Any]) -> VersionSpan:
    if not str(span["version"]).isdecimal():
        raise EngineError(
            f"SGLang sampled with weights of version {span['version']!r}, which LongArc did not put there; "
            f"does somebody else update this server?"
        )
    return VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"])
