"""Fakes of servers that prefill for one another, as the documentation of vLLM and SGLang has them.

What neither page says, such as whose version SGLang reports for the first token, no fake knows either.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fake_engine_servers import FakeSglang, FakeVllm

BOOTSTRAP_PORT = 8997


@dataclass
class Rooms:
    """Where a prefill server and a decode server of SGLang meet; each waits for the other."""

    have_come: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)

    async def meet(self, mode: str, room: int) -> None:
        other = "decode" if mode == "prefill" else "prefill"
        self._event(mode, room).set()
        await self._event(other, room).wait()

    def _event(self, mode: str, room: int) -> asyncio.Event:
        return self.have_come.setdefault((mode, room), asyncio.Event())


@dataclass
class FakeSglangPart(FakeSglang):
    """SGLang with ``--disaggregation-mode``."""

    mode: str = "prefill"
    rooms: Rooms = field(default_factory=Rooms)
    host: str = "prefill"
    num_given_up: int = 0
    """Requests whose connection was closed while they waited for the other server."""

    def __post_init__(self) -> None:
        self.info = {
            "enable_metrics": True,
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
        }

    async def _generate(self, body: Any) -> Any:
        if body.get("bootstrap_room") is None:
            return {
                "error": {"message": "Disaggregated request received without bootstrap room id"}
            }
        assert (body["bootstrap_host"], body["bootstrap_port"]) == (self.host, BOOTSTRAP_PORT)
        try:
            await self.rooms.meet(self.mode, body["bootstrap_room"])
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        answer = await super()._generate(body)
        if self.mode == "decode" and not isinstance(answer, AsyncGenerator):
            # Prompts are none of its business: their log-probabilities are in the other's answer.
            answer["meta_info"]["input_token_logprobs"] = []
        return answer

    def _answer(self, *args: Any) -> dict[str, Any]:
        answer = super()._answer(*args)
        if self.mode == "decode":
            answer["meta_info"]["cached_tokens"] = 1000
        return answer


def sglang_parts(
    *, host: str = "prefill", **of_decode: Any
) -> tuple[FakeSglangPart, FakeSglangPart]:
    """Return a prefill server and a decode server that know each other."""
    rooms = Rooms()
    return (
        FakeSglangPart(mode="prefill", rooms=rooms, host=host),
        FakeSglangPart(mode="decode", rooms=rooms, host=host, **of_decode),
    )


@dataclass
class FakeVllmPart(FakeVllm):
    """vLLM with NixlConnector, whose part in a request ``kv_transfer_params`` says."""

    kept: dict[str, list[int]] = field(default_factory=dict)
    """Prompts whose cache waits for a decode server, by request; the two servers share this."""
    keeps_caches: bool = True
    may_answer: asyncio.Event | None = None
    """What a finished prefill waits for before it is told."""
    computed: list[list[int]] = field(default_factory=list)
    """Prompts that this server computed itself."""
    kv_transfer_config: dict[str, Any] | None = field(
        default_factory=lambda: {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    )

    def handlers(self) -> Mapping[str, Callable[[Any], Any]]:
        info = {
            "model_config": {"logprobs_mode": self.logprobs_mode},
            "kv_transfer_config": self.kv_transfer_config,
        }
        return {**super().handlers(), "/server_info": lambda _: {"vllm_config": info}}

    async def _generate(self, body: Any) -> Any:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            assert self.kept.pop(params["remote_request_id"]) == body["token_ids"]
            answer = await super()._generate(body)
            if not isinstance(answer, AsyncGenerator):
                answer["usage"]["prompt_tokens_details"]["cached_tokens"] = 1000
            return answer
        self.computed.append(body["token_ids"])
        answer = await super()._generate(body)
        if params.get("do_remote_decode") and self.keeps_caches:
            assert body["sampling_params"]["max_tokens"] == 1
            self.kept[body["request_id"]] = body["token_ids"]
            if self.may_answer is not None:
                await self.may_answer.wait()
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2]],
                "remote_engine_id": "prefill",
                "remote_request_id": body["request_id"],
                "remote_host": "prefill",
                "remote_port": 5600,
                "tp_size": 1,
            }
        return answer


def vllm_parts(**of_decode: Any) -> tuple[FakeVllmPart, FakeVllmPart]:
    """Return a prefill server and a decode server that know each other."""
    kept: dict[str, list[int]] = {}
    return FakeVllmPart(kept=kept), FakeVllmPart(kept=kept, **of_decode)
