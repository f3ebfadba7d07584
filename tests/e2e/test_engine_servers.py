"""Engine servers as a user starts them: real processes, killed, drained and trained through."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from longarc.config.engine import EngineConfig
from longarc.config.loader import load_settings
from longarc.config.model import GlmMoeDsaConfig
from longarc.config.recipe import Recipe
from longarc.config.routing import RoutingConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.remote import RemoteEngine
from longarc.engine.router import Router
from longarc.errors import EngineLostError
from longarc.gateway.server import bound_socket
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256
from longarc.runs.directory import RunDirectory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MODEL = GlmMoeDsaConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    index_topk=16,
    max_position_embeddings=256,
    initializer_range=0.2,
)
KEY = "an engine's key"
NUM_RUNNING = 200
NUM_REQUESTS = 260
"""More than run at once, so that others begin where some end."""
NUM_TOKENS = 120


@contextmanager
def server(source: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run ``longarc serve --engine-only`` until the block ends."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "longarc.cli.main", "serve", str(source), "--engine-only"),
            *("--port", "0", "--api-key", KEY, *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address_of(process: "subprocess.Popen[str]") -> str:
    """Wait until a server is up."""
    assert process.stdout is not None
    said = ""
    while line := process.stdout.readline():
        found = re.search(r"address=(\S+)", line)
        if found:
            return found[1]
        said += line  # a warning, that kernels were not built say
    raise AssertionError(said)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose stage ``sft`` is finished; its engine runs 256 sequences at once."""
    path = tmp_path_factory.mktemp("engine") / "run"
    recipe = load_settings(Recipe, ROOT / "recipes" / "smoke.toml").model_dump(mode="json")
    recipe["engine"] |= {"max_running": 256}
    with RunDirectory.create(path, recipe=recipe, seeds={"run": 0}) as opened:
        directory = opened.stage("sft")
        directory.set_final(
            directory.writer(keep_last=1).write(
                lambda place: save_weights(build_model(MODEL, seed=0), place / "model.safetensors"),
                kind="policy",
                stage="sft",
                step=1,
                policy_version=3,
                model=MODEL.model_dump(mode="json"),
                tokenizer_sha256=None,
                info={"attention": "sparse"},
            )
        )
    return path


def weights(path: Path, *, seed: int) -> WeightSource:
    save_weights(build_model(MODEL, seed=seed), str(path))
    return WeightSource(path=str(path), sha256=file_sha256(path))


async def sampled(engine, index: int, *, num_tokens: int | None = None):
    """Return ids, log-probabilities and versions of one completion; few are of equal length."""
    asked = Sampling(
        max_new_tokens=num_tokens or NUM_TOKENS + index % 40, seed=index, temperature=0.9
    )
    ids, logprobs, versions = [], [], []
    async for piece in engine.stream([1, 2, index % 60], asked, session_id=f"session {index}"):
        ids.extend(piece.token_ids)
        logprobs.extend(piece.logprobs)
        versions.extend([piece.policy_version] * len(piece.token_ids))
    return ids, logprobs, versions


async def undisturbed():
    """Return what one engine in this process samples for all requests."""
    config = EngineConfig(max_running=256)
    engine = EmbeddedEngine(build_model(MODEL, seed=0), config, max_context_tokens=256)
    async with engine, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(sampled(engine, i)) for i in range(NUM_REQUESTS)]
    return [task.result() for task in running]


@pytest.fixture(scope="module")
def servers(run):
    """Start two servers, one of them with two ranks; gives processes and addresses."""
    with server(run) as first, server(run, "--ranks", "2") as second:
        yield [(process, address_of(process)) for process in (first, second)]


async def test_metrics_and_health_are_there_for_who_may_ask(servers):
    _, address = servers[1]
    async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/metrics")).status_code == 401
        page = await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
    assert 'longarc_engine_policy_version_steps{rank="1"} 3.0' in page.text.splitlines()


async def test_a_killed_server_loses_none_of_two_hundred_running_sequences(servers):
    (first, one), (_, other) = servers
    async with (
        RemoteEngine(one, api_key=KEY) as a,
        RemoteEngine(other, api_key=KEY) as b,
        Router({one: a, other: b}, RoutingConfig(keep_every_tokens=16)) as router,
    ):
        await router.health()
        places = asyncio.Semaphore(NUM_RUNNING)
        some_ended = asyncio.Event()

        async def one(index: int):
            async with places:
                result = await sampled(router, index)
            some_ended.set()
            return result

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(i)) for i in range(NUM_REQUESTS)]
            await some_ended.wait()
            num_open = {worker.engine: worker.num_open for worker in router._fleet.workers}
            first.send_signal(signal.SIGKILL)
        assert (await b.health()).num_running == 0
    assert sum(num_open.values()) > 0.9 * NUM_RUNNING
    assert num_open[a] > 0.3 * NUM_RUNNING
    results = [task.result() for task in running]
    assert [len(ids) for ids, _, _ in results] == [NUM_TOKENS + i % 40 for i in range(NUM_REQUESTS)]
    expected = await undisturbed()
    assert [ids for ids, _, _ in results] == [ids for ids, _, _ in expected]
    assert {v for _, _, versions in results for v in versions} == {3}
    for (_, logprobs, _), (_, wanted, _) in zip(results, expected, strict=True):
        assert logprobs == pytest.approx(wanted, abs=1e-4)


async def test_a_server_that_is_told_to_stop_ends_what_runs_and_takes_nothing_new(
    servers, tmp_path
):
    process, address = servers[1]
    async with RemoteEngine(address, api_key=KEY, rank=1) as engine:
        described = await engine.describe()
        assert (described.num_ranks, described.attention) == (2, "sparse")
        assert described.model == MODEL.model_dump(mode="json")
        await engine.update_weights(weights(tmp_path / "new", seed=1), policy_version=4)
        asked = Sampling(max_new_tokens=240, seed=1, stream_interval_tokens=1)
        stream = engine.stream([1, 2], asked, session_id="a")
        pieces = [await anext(stream)]
        process.send_signal(signal.SIGTERM)
        refusal = None
        while refusal is None:  # the signal takes its way
            try:
                await sampled(engine, 1, num_tokens=1)
            except EngineLostError as error:
                refusal = error
        pieces += [piece async for piece in stream]
    assert re.search(r"going to stop|cannot be reached", str(refusal))
    assert sum(len(piece.token_ids) for piece in pieces) == 240
    assert {piece.policy_version for piece in pieces} == {4}
    assert await asyncio.to_thread(process.wait, 20) == 0


def write_recipe(path: Path) -> Path:
    """Write a recipe of two short stages, the second of which samples at a server that is not there yet."""
    with bound_socket() as free:
        port = free.getsockname()[1]
    path.write_text(f"""
name = "through-servers"
threads = 1
[model]
family = "glm_moe_dsa"
hidden_size = 64
num_hidden_layers = 3
intermediate_size = 96
moe_intermediate_size = 32
n_routed_experts = 4
index_topk = 32
vocab_size = 1024
[tokenizer]
vocab_size = 1024
training_bytes = 300_000
[engine]
servers = ["http://127.0.0.1:{port}"]
[tasks.reasoning]
path = "longarc.envs.tasks.reasoning:Reasoning"
[stages.pretrain]
kind = "pretrain"
num_steps = 2
context_tokens = 128
tokens_per_step = 1024
corpus = {{ max_bytes = 1_000_000, copy_share_frac = 0.6 }}
[stages.reasoning_rl]
kind = "reasoning_rl"
loop = {{ num_steps = 2, groups_per_step = 2, group_size = 4, dynamic_sampling = false }}
rollout = {{ max_new_tokens = 24, max_context_tokens = 512 }}
loss = {{ path = "longarc.algos.losses:icepop", settings = {{ low = 0.5, high = 2.0, eps_low = 0.2, eps_high = 0.28 }}, reduction = "sequence_mean" }}
[stages.reasoning_rl.tasks]
reasoning = {{}}
""")
    return path


def test_a_stage_is_trained_through_servers(tmp_path):
    run_dir = tmp_path / "run"
    environment = {**os.environ, "LONGARC_ENGINE_KEY": KEY}
    recipe = write_recipe(tmp_path / "recipe.toml")

    def longarc(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "longarc.cli.main", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=False,
        )

    first = longarc("run", str(recipe), "--run-dir", str(run_dir), "--servers-later")
    assert first.returncode == 1, first.stderr
    assert "cannot be reached" in first.stdout + first.stderr
    port = re.search(r":(\d+)\"", recipe.read_text())[1]
    with server(run_dir, "--port", port, "--max-context-tokens", "512") as process:
        assert address_of(process).endswith(port)
        done = longarc("run", str(recipe), "--run-dir", str(run_dir), "--resume")
        assert done.returncode == 0, done.stdout + done.stderr
    audit = longarc("runs", "audit", str(run_dir))
    assert audit.returncode == 0, audit.stdout
