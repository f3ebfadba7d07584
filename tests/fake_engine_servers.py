"""Fakes of vLLM's and SGLang's servers, as their documentation has them, behind httpx's transport.

They sample counting tokens (prompt end + 1, + 2, ...) with log-probability -(token / 100), and know only the
endpoints and fields that LongArc uses. What a real server adds is for the integration tests.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from longarc.engine.http_json import HttpJson


class _Events(httpx.AsyncByteStream):
    def __init__(self, lines: AsyncGenerator[str]) -> None:
        self._lines = lines

    async def aclose(self) -> None:
        await self._lines.aclose()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for line in self._lines:
            yield line.encode()


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """What both have: a log of requests, versions that change while sequences run, answers to order."""

    version: str = "default"
    tokens_before_pause: int | None = None
    """A running completion stops after so many tokens until the server has been paused and resumed."""
    refuses: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """Status and JSON by path, in place of the answer."""
    finish_reason: str = "length"
    says_versions: bool = True
    nan_at: int | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    was_resumed: asyncio.Event = field(default_factory=asyncio.Event)
    num_left: int = 0
    """Streams that were closed before their end."""

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def body(self, path: str) -> Any:
        return next(body for called, body in reversed(self.calls) if called == path)

    def http(self) -> HttpJson:
        return HttpJson("http://fake", transport=self)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        body = json.loads(content) if content else None
        path = request.url.path
        query = dict(request.url.params)
        self.calls.append((path, {**(body or {}), **query} if query else body))
        if path in self.refuses:
            status, answer = self.refuses[path]
            return httpx.Response(status, json=answer)
        handler: Callable[[Any], Any] | None = self.handlers().get(path)
        if handler is None:
            return httpx.Response(404, json={"detail": "Not Found"})
        answer = handler(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, AsyncGenerator):
            return httpx.Response(200, stream=_Events(answer))
        if isinstance(answer, str):
            return httpx.Response(200, text=answer)
        return httpx.Response(200, json=answer)

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        raise NotImplementedError

    def sampled(self, prompt: list[int], count: int) -> list[tuple[int, float | None]]:
        tokens = [prompt[-1] + 1 + i for i in range(count)]
        return [(t, None if i == self.nan_at else -t / 100) for i, t in enumerate(tokens)]

    async def versions(self, count: int, first: str) -> list[dict[str, Any]]:
        """Let weights change in the middle where that was ordered; return the spans."""
        split = self.tokens_before_pause
        if split is None or split >= count:
            return [{"version": first, "start": 0, "end": count}]
        await self.was_resumed.wait()
        return [
            {"version": first, "start": 0, "end": split},
            {"version": self.version, "start": split, "end": count},
        ]


@dataclass
class FakeVllm(FakeServer):
    """vLLM 0.32.0 in development mode with scale-out endpoints."""

    load_results: list[dict[str, Any]] = field(default_factory=lambda: [{"seconds": 0.1}])
    logprobs_mode: str = "processed_logprobs"
    sampling_mask: list[list[int]] | None = None

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "/health": lambda _: "",
            "/inference/v1/generate": self._generate,
            "/pause": lambda _: {"status": "paused"},
            "/resume": self._resume,
            "/collective_rpc": lambda _: {"results": self.load_results},
            "/reset_prefix_cache": lambda _: {"success": True},
            "/update_weight_version": self._label,
            "/server_info": lambda _: {
                "vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}
            },
            "/metrics": lambda _: (
                "# HELP vllm:num_requests_running running\n"
                'vllm:num_requests_running{engine="0"} 2.0\n'
                'vllm:num_requests_running{engine="1"} 1.0\n'
                'vllm:num_requests_waiting{engine="0"} 4.0\n'
                'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
                'vllm:generation_tokens_total{engine="0"} 1.5e+03\n'
                'vllm:prompt_tokens_total{engine="0"} 80.0\n'
                'vllm:prompt_tokens_cached_total{engine="0"} 16.0\n'
            ),
        }

    def _label(self, body: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True}

    def _resume(self, _: Any) -> Any:
        self.was_resumed.set()
        return {"status": "resumed"}

    async def _generate(self, body: Any) -> Any:
        params, prompt = body["sampling_params"], body["token_ids"]
        entries = self.sampled(prompt, params["max_tokens"])
        if body.get("stream"):
            return self._events(entries)
        spans = await self.versions(len(entries), self.version)
        answer = {
            "choices": [self._choice(entries, self.finish_reason, spans)],
            "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
        }
        if "prompt_logprobs" in params:
            answer["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": -t / 100}} for t in prompt[1:]),
            ]
        return answer

    async def _events(self, entries: list[tuple[int, float | None]]) -> AsyncGenerator[str]:
        is_over, first = False, self.version
        try:
            for index, entry in enumerate(entries):
                is_last = index + 1 == len(entries)
                if index == self.tokens_before_pause:
                    await self.was_resumed.wait()
                spans = await self.versions(len(entries), first) if is_last else None
                choice = self._choice([entry], self.finish_reason if is_last else None, spans)
                yield f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"
            usage = {"prompt_tokens_details": {"cached_tokens": 3}}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
            is_over = True
        finally:
            self.num_left += not is_over

    def _choice(
        self,
        entries: list[tuple[int, float | None]],
        reason: str | None,
        spans: list[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        return {
            "finish_reason": reason,
            "token_ids": [token for token, _ in entries],
            "logprobs": {"content": [{"token_id": t, "logprob": lp} for t, lp in entries]},
            "sampling_mask": self.sampling_mask,
            "weight_versions": spans,
        }


@dataclass
class FakeSglang(FakeServer):
    """SGLang 0.5 with metrics; streams what is new (``incremental``) or all so far."""

    is_incremental: bool = False
    info: dict[str, Any] = field(default_factory=lambda: {"enable_metrics": True})
    update_answer: dict[str, Any] = field(
        default_factory=lambda: {"success": True, "message": "", "num_paused_requests": 0}
    )
    seen_files: list[list[str]] = field(default_factory=list)
    on_update: Callable[[Any], None] | None = None

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "/health": lambda _: "",
            "/generate": self._generate,
            "/abort_request": lambda _: {},
            "/pause_generation": lambda _: {"status": "ok"},
            "/continue_generation": self._resume,
            "/update_weights_from_disk": self._update,
            "/update_weights_from_tensor": self._update,
            "/update_weights_from_distributed": self._update,
            "/init_weights_update_group": lambda _: {"success": True, "message": ""},
            "/update_weight_version": self._label,
            "/get_server_info": lambda _: self.info,
            "/metrics": lambda _: (
                'sglang:num_running_reqs{model="m"} 2.0\n'
                'sglang:num_queue_reqs{model="m"} 1.0\n'
                'sglang:generation_tokens_total{model="m"} 50.0\n'
                'sglang:prompt_tokens_total{model="m"} 30.0\n'
                'sglang:cached_tokens_total{model="m"} 10.0\n'
            ),
        }

    def _label(self, body: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True}

    def _resume(self, _: Any) -> Any:
        self.was_resumed.set()
        return {"status": "ok"}

    def _update(self, body: Any) -> Any:
        if self.on_update is not None:
            self.on_update(body)
        if self.update_answer["success"]:
            self.version = body["weight_version"]
        return self.update_answer

    async def _generate(self, body: Any) -> Any:
        prompt = body["input_ids"]
        entries = self.sampled(prompt, body["sampling_params"]["max_new_tokens"])
        if body.get("stream"):
            return self._events(entries)
        spans = await self.versions(len(entries), self.version)
        answer = self._answer(entries, len(entries), self.finish_reason, spans)
        if body.get("logprob_start_len") == 0:
            answer["meta_info"]["input_token_logprobs"] = [
                [None, prompt[0], None],
                *([-t / 100, t, None] for t in prompt[1:]),
            ]
        return answer

    async def _events(self, entries: list[tuple[int, float | None]]) -> AsyncGenerator[str]:
        first = self.version
        for index in range(len(entries)):
            is_last = index + 1 == len(entries)
            if index == self.tokens_before_pause:
                await self.was_resumed.wait()
            spans = await self.versions(len(entries), first) if is_last else None
            shown = entries[index : index + 1] if self.is_incremental else entries[: index + 1]
            reason = self.finish_reason if is_last else None
            yield f"data: {json.dumps(self._answer(shown, index + 1, reason, spans))}\n\n"
        yield "data: [DONE]\n\n"

    def _answer(
        self,
        entries: list[tuple[int, float | None]],
        total: int,
        reason: str | None,
        spans: list[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": None if reason is None else {"type": reason, "length": total},
            "output_token_logprobs": [[lp, token, None] for token, lp in entries],
            "output_token_logprobs_length": total,
            "cached_tokens": 3,
            "weight_version": self.version,
        }
        if self.says_versions and spans is not None:
            meta["weight_versions"] = spans
        return {"output_ids": [token for token, _ in entries], "meta_info": meta}
