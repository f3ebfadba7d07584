"""Proves that `longarc gateway` starts and serves in the base install: run by check_wheel.sh with that Python.

An engine server that says one word runs here, the gateway in a process of its own.
"""

import asyncio
import importlib.util
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import orjson

from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.wire import EngineDescription
from longarc.gateway.server import bound_socket, serving
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource
from longarc.tokens.tokenizer import Tokenizer

assert importlib.util.find_spec("torch") is None, "the base install must not bring torch"

TEXT = "the gateway alone says this and no more\n" * 40
TOKENIZER = Tokenizer.train(
    [TEXT], vocab_size=270, special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>")
)
ADMIN = {"authorization": "Bearer admin"}


class OneWord:
    """Says one word to everybody."""

    def __init__(self) -> None:
        self.ids = (*TOKENIZER.encode("alone"), TOKENIZER.special_id("<|im_end|>"))

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Sample."""
        yield SampledTokens(
            token_ids=self.ids,
            logprobs=(-0.5,) * len(self.ids),
            policy_version=4,
            finish_reason="stop",
        )

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Refuse: nobody asks."""
        raise NotImplementedError

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Refuse: nobody asks."""
        raise NotImplementedError

    async def health(self) -> EngineHealth:
        """Be well."""
        return EngineHealth(
            is_ready=True,
            policy_version=4,
            num_running=0,
            num_waiting=0,
            num_sampled_tokens=0,
            num_prompt_tokens=0,
            num_cached_tokens=0,
        )


async def main() -> None:
    """Ask once, and look at the segment."""
    engine = OneWord()
    description = EngineDescription(
        model={}, attention="dense", max_context_tokens=512, num_ranks=1
    )
    door = EngineDoor([engine], description, DoorSettings(api_key="k"))
    with tempfile.TemporaryDirectory() as scratch:
        TOKENIZER.save(Path(scratch) / "tokenizer.json")
        async with serving(door.app(), bound_socket(), grace_s=1) as upstream:
            process = await asyncio.create_subprocess_exec(
                *(str(Path(sys.executable).parent / "longarc"), "gateway", scratch),
                *("--upstream", upstream, "--chat-format", "chatml", "--port", "0"),
                *("--sessions", f"{scratch}/sessions", "--admin-key", "admin"),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "LONGARC_ENGINE_KEY": "k"},
            )
            try:
                assert process.stdout is not None
                line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
                address = line.partition("address=")[2].split()[0]
                async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
                    await ask(client, engine.ids)
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 60) == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    print("gateway: answers alone, in the base install")


async def ask(client: httpx.AsyncClient, ids: Sequence[int]) -> None:
    """Mint a key, ask, and compare the segment with what was sampled."""
    minted = (await client.post("/admin/sessions", headers=ADMIN, json={})).json()
    chat = {"model": "m", "messages": [{"role": "user", "content": "who"}]}
    reply = await client.post(f"/s/{minted['key']}/v1/chat/completions", json=chat)
    assert reply.json()["choices"][0]["message"]["content"] == "alone", reply.text
    path = f"/admin/sessions/{minted['session_id']}/segments"
    segment = orjson.loads((await client.get(path, headers=ADMIN)).content)
    trained = zip(segment["token_ids"], segment["train_mask"], strict=True)
    assert [token for token, is_trained in trained if is_trained] == list(ids), segment


asyncio.run(main())
