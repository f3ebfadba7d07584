"""A gateway over a scripted engine with one open rollout session, and clients of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai

from fakes import FakeEngine
from longarc.gateway.access import RolloutAccess
from longarc.gateway.core import Gateway
from longarc.gateway.http import HttpSettings, build_app
from longarc.gateway.server import bound_socket, serving
from longarc.gateway.session import GatewaySession
from longarc.gateway.turn_log import TurnLog
from longarc.records.sampling import Sampling
from longarc.tokens.glm import GlmFormat
from token_samples import sampled, small_tokenizer

FORMAT = GlmFormat(small_tokenizer())
SAMPLING = Sampling(max_new_tokens=300, temperature=0.7)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
LOOK = sampled(
    "look</think><tool_call>bash<arg_key>command</arg_key><arg_value>ls 'a b'\n</arg_value></tool_call>"
    "<|observation|>"
)
DONE = sampled("seen</think>the word<|user|>")


class SlowEngine(FakeEngine):
    """Lets the loop run between two pieces, as every real engine does."""

    def stream(self, prompt_ids, sampling, *, session_id):
        return self._slowly(super().stream(prompt_ids, sampling, session_id=session_id))

    async def _slowly(self, stream):
        try:
            async for piece in stream:
                yield piece
                for _ in range(20):
                    await asyncio.sleep(0)
        finally:
            await stream.aclose()


class Door:
    """A running gateway with one open rollout session."""

    def __init__(
        self,
        engine: FakeEngine,
        settings: HttpSettings | None = None,
        *,
        turn_log: TurnLog | None = None,
    ) -> None:
        self.engine = engine
        self.gateway = Gateway(engine, FORMAT, turn_log=turn_log)
        self.access = RolloutAccess()
        self.session: GatewaySession = self.gateway.open(
            "stage/0/0/0", sampling=SAMPLING, thinking=True, max_context_tokens=4096
        )
        self.key = self.access.admit(self.session)
        self.app = build_app(self.gateway, self.access, settings, clock=lambda: 1234.5)

    @asynccontextmanager
    async def sdk(self, *, by_path: bool = False) -> AsyncIterator[openai.AsyncOpenAI]:
        async with serving(self.app, bound_socket()) as url:
            base = f"{url}/s/{self.key}/v1" if by_path else f"{url}/v1"
            key = "unused" if by_path else self.key
            async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
                yield client

    @asynccontextmanager
    async def anthropic(self) -> AsyncIterator[anthropic.AsyncAnthropic]:
        async with (
            serving(self.app, bound_socket()) as url,
            anthropic.AsyncAnthropic(
                base_url=f"{url}/s/{self.key}", api_key="unused", max_retries=0
            ) as client,
        ):
            yield client

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app)
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers
        ) as client:
            yield client


def chat_body(**more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "q"}]} | more
