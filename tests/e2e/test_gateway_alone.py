"""`longarc gateway` as people start it: a process of its own without torch, killed and started again."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson
import pytest

from fakes import FakeWorkerEngine
from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.wire import EngineDescription
from longarc.gateway.server import bound_socket, serving
from longarc.records.sampling import SampledTokens
from token_samples import chatml_tokenizer

pytestmark = pytest.mark.e2e

ADMIN = {"authorization": "Bearer admin"}
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from longarc.cli.main import main; "
    "sys.exit(main(sys.argv[1:]))"
)
CHAT = {"model": "any", "messages": [{"role": "user", "content": "the quick brown fox"}]}


class SlowEngine(FakeWorkerEngine):
    """Says one word in two pieces, the second one when it may."""

    def __init__(self) -> None:
        super().__init__()
        tokenizer = chatml_tokenizer()
        self.ids = (*tokenizer.encode("lazy dog"), tokenizer.special_id("<|im_end|>"))
        self.prompts: list[tuple[int, ...]] = []
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def stream(self, prompt_ids, sampling, *, session_id) -> AsyncIterator[SampledTokens]:
        self.prompts.append(tuple(prompt_ids))
        yield SampledTokens(token_ids=self.ids[:1], logprobs=(-0.5,), policy_version=2)
        self.has_begun.set()
        await self.may_end.wait()
        rest = self.ids[1:]
        yield SampledTokens(
            token_ids=rest,
            logprobs=tuple(-0.25 * (i + 1) for i in range(len(rest))),
            policy_version=3,
            finish_reason="stop",
        )


@asynccontextmanager
async def engine_server(engine: SlowEngine) -> AsyncIterator[str]:
    description = EngineDescription(
        model={"family": "fake"}, attention="dense", max_context_tokens=512, num_ranks=1
    )
    door = EngineDoor([engine], description, DoorSettings(api_key="engine-key"))
    async with serving(door.app(), bound_socket(), grace_s=1) as address:
        yield address


@asynccontextmanager
async def gateway(model: Path, upstream: str, sessions: Path, *, drain_s: int = 10):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WITHOUT_TORCH, "gateway", str(model), "--upstream", upstream),
        *("--chat-format", "chatml", "--sessions", str(sessions), "--port", "0"),
        *("--admin-key", "admin", "--drain-s", str(drain_s)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "LONGARC_ENGINE_KEY": "engine-key"},
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert "address=" in line, line
        address = line.partition("address=")[2].split()[0]
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def segments(client: httpx.AsyncClient, session_id: str) -> list[dict[str, list[int]]]:
    reply = await client.get(f"/admin/sessions/{session_id}/segments", headers=ADMIN)
    return [orjson.loads(line) for line in reply.text.splitlines()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    chatml_tokenizer().save(directory / "tokenizer.json")
    return directory


async def test_killed_in_mid_stream_it_comes_back_and_the_clients_retry_goes_on(model, tmp_path):
    engine = SlowEngine()
    sessions = tmp_path / "sessions"
    async with engine_server(engine) as upstream:
        async with gateway(model, upstream, sessions) as (process, client):
            minted = await client.post("/admin/sessions", headers=ADMIN, json={"session_id": "run"})
            key = {"authorization": f"Bearer {minted.json()['key']}"}
            engine.may_end.set()
            first = await client.post("/v1/chat/completions", headers=key, json=CHAT)
            answer = first.json()["choices"][0]["message"]
            assert answer["content"] == "lazy dog"
            engine.may_end.clear()
            engine.has_begun.clear()
            more = {**CHAT, "stream": True}
            more["messages"] = [*CHAT["messages"], answer, {"role": "user", "content": "more"}]
            asking = asyncio.create_task(
                client.post("/v1/chat/completions", headers=key, json=more)
            )
            await asyncio.wait_for(engine.has_begun.wait(), 60)
            before = await segments(client, "run")
            written = (sessions / "run.jsonl").read_bytes()
            process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                await asking
        assert (sessions / "run.jsonl").read_bytes() == written

        async with gateway(model, upstream, sessions) as (process, client):
            assert await segments(client, "run") == before
            engine.may_end.set()
            again = await client.post("/v1/chat/completions", headers=key, json=more)
            assert "data: [DONE]" in again.text
            (segment,) = await segments(client, "run")
            # The stored ids of the first turn begin the second prompt, across the restart.
            assert engine.prompts[-1] == tuple(segment["token_ids"][: len(engine.prompts[-1])])
            trained = zip(segment["token_ids"], segment["train_mask"], strict=True)
            assert [token for token, is_trained in trained if is_trained] == [*engine.ids] * 2
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_told_to_stop_it_lets_running_requests_end_first(model, tmp_path):
    engine = SlowEngine()
    async with (
        engine_server(engine) as upstream,
        gateway(model, upstream, tmp_path / "sessions") as (process, client),
    ):
        minted = (await client.post("/admin/sessions", headers=ADMIN, json={})).json()
        url = f"/s/{minted['key']}/v1/chat/completions"
        asking = asyncio.create_task(client.post(url, json=CHAT))
        await asyncio.wait_for(engine.has_begun.wait(), 60)
        process.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False) as late:
            while True:  # until the door is closed
                try:
                    await late.get("/health")
                except httpx.HTTPError:
                    break
        engine.may_end.set()
        assert (await asking).json()["choices"][0]["message"]["content"] == "lazy dog"
        assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat-format", "glm-5"], "control token"),
        (["--chat-format", "chatml", "--engine", "vllm"], "--policy-version"),
        (["--chat-format", "chatml", "--policy-version", "3"], "leave it out"),
        (["--chat-format", "chatml", "--max-context-tokens", "4096"], "512 tokens"),
        (["--chat-format", "chatml", "--admin-key", ""], "--admin-key is empty"),
        (["--chat-format", "chatml", "--template", "t.jinja"], "--template is for"),
        (["--chat-format", "template"], "there is no chat template"),
        (["--chat-format", "chatlm"], "did you mean 'chatml'?"),
        (["--chat-format", "no_such.module:format"], "no_such"),
    ],
)
async def test_what_does_not_fit_the_engines_is_said_and_nothing_starts(
    model, tmp_path, arguments, message
):
    async with engine_server(SlowEngine()) as upstream:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WITHOUT_TORCH, "gateway", str(model), "--upstream", upstream),
            *("--sessions", str(tmp_path / "sessions"), "--port", "0", *arguments),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "LONGARC_ENGINE_KEY": "engine-key"},
        )
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.read(), 60)).decode()
        assert await process.wait() in (2, 4)
    assert message in said
    assert "Traceback" not in said
