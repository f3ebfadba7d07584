import asyncio
import base64
import pickle
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fake_engine_servers import FakeSglang
from longarc.config.engine_clients import SglangConfig
from longarc.engine.served import BrokenServerError, ServedEngine, ServedLimits
from longarc.engine.sglang import SglangServer
from longarc.engine.sglang_weights import DiskTransport, TensorTransport, transport_of
from longarc.errors import ConfigError, EngineError, EngineFaultError
from longarc.records.constraint import Constraint
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

LIMITS = ServedLimits(vocab_size=100, max_context_tokens=64, max_requests=8, update_timeout_s=30.0)
PROMPT = [5, 6, 7]
CONFIG = SglangConfig(kind="sglang", url="http://fake")


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"b": torch.arange(3.0), "a": torch.ones(2, 2)}, path)
    return WeightSource(path=str(path), sha256=file_sha256(path))


@pytest.fixture
def disk(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors.index.json").write_text("{}")
    return lambda http: DiskTransport(http, model_directory=model, directory=tmp_path)


def make(fake, disk, *, on_update="continue"):
    fake.version = "0"
    http = fake.http()
    server = SglangServer(http, disk(http), on_update=on_update)
    return ServedEngine(server, LIMITS, policy_version=0, seed=3)


async def pieces_of(engine, prompt=PROMPT, **sampling):
    asked = Sampling(**{"max_new_tokens": 6, **sampling})
    return [piece async for piece in engine.stream(prompt, asked, session_id="s")]


async def test_a_completion_comes_with_log_probabilities_version_and_cache_use(disk):
    fake = FakeSglang()
    (piece,) = await pieces_of(make(fake, disk), temperature=0.5, stop_ids=(2,), seed=11)
    assert piece.token_ids == (8, 9, 10, 11, 12, 13)
    assert piece.logprobs == tuple(-t / 100 for t in piece.token_ids)
    assert (piece.policy_version, piece.finish_reason, piece.num_cached_tokens) == (0, "length", 3)
    body = fake.body("/generate")
    assert (body["input_ids"], body["return_logprob"]) == (PROMPT, True)
    wanted = {
        "max_new_tokens": 6,
        "temperature": 0.5,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "sampling_seed": 11,
    }
    assert body["sampling_params"] | wanted == body["sampling_params"]


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_both_kinds_of_streams_give_the_same_pieces(disk, is_incremental):
    engine = make(FakeSglang(is_incremental=is_incremental), disk)
    pieces = await pieces_of(engine, stream_interval_tokens=2, max_new_tokens=5)
    assert [piece.token_ids for piece in pieces] == [(8, 9), (10, 11), (12,)]


@pytest.mark.parametrize(
    ("on_update", "mode", "flushes"),
    [("continue", "in_place", False), ("recompute", "retract", True)],
)
async def test_tokens_before_and_after_an_update_carry_their_versions(
    disk, weights, on_update, mode, flushes
):
    fake = FakeSglang(tokens_before_pause=4)
    engine = make(fake, disk, on_update=on_update)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pieces_of(engine, max_new_tokens=8))
        while "/generate" not in fake.paths():
            await asyncio.sleep(0)
        await engine.update_weights(weights, policy_version=1)
    assert [(p.token_ids, p.policy_version) for p in running.result()] == [
        ((8, 9, 10, 11), 0),
        ((12, 13, 14, 15), 1),
    ]
    assert fake.paths()[1:] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    assert fake.body("/pause_generation") == {"mode": mode}
    assert fake.body("/update_weights_from_disk")["flush_cache"] is flushes


async def test_finish_updates_once_nothing_runs_any_more(disk, weights):
    fake = FakeSglang(tokens_before_pause=4)
    engine = make(fake, disk, on_update="finish")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pieces_of(engine, max_new_tokens=8))
        while "/generate" not in fake.paths():
            await asyncio.sleep(0)
        update = tasks.create_task(engine.update_weights(weights, policy_version=1))
        await asyncio.sleep(0.05)
        assert "/update_weights_from_disk" not in fake.paths()
        fake.was_resumed.set()
        await update
    assert {piece.policy_version for piece in running.result()} == {0}
    assert fake.version == "1"


async def test_a_server_that_names_no_versions_is_believed_only_where_nothing_changed(
    disk, weights
):
    fake = FakeSglang(says_versions=False, tokens_before_pause=4)
    engine = make(fake, disk)
    fake.was_resumed.set()
    assert {piece.policy_version for piece in await pieces_of(engine)} == {0}
    fake.was_resumed.clear()
    running = asyncio.ensure_future(pieces_of(engine))
    while fake.paths().count("/generate") < 2:
        await asyncio.sleep(0)
    await engine.update_weights(weights, policy_version=1)
    with pytest.raises(EngineError, match=r'engine\.on_update = "finish"'):
        await running


async def test_the_server_reads_the_published_file_through_a_directory(disk, weights, tmp_path):
    seen = []

    def look(body):
        place = Path(body["model_path"])
        seen.append(sorted(path.name for path in place.iterdir()))
        seen.append(sorted(load_file(place / "model.safetensors")))

    fake = FakeSglang(on_update=look)
    await make(fake, disk).update_weights(weights, policy_version=7)
    assert seen == [["config.json", "model.safetensors"], ["a", "b"]]
    assert fake.body("/update_weights_from_disk")["weight_version"] == "7"
    assert not (tmp_path / "v7").exists()
    assert Path(weights.path).exists()


async def test_tensors_are_shared_with_every_rank(weights):
    received = []

    def look(body):
        # As SGLang's own reader does: pickled (name, tensor) pairs, base64, one entry a rank.
        received.append(
            [pickle.loads(base64.b64decode(one)) for one in body["serialized_named_tensors"]]
        )

    fake = FakeSglang(on_update=look)
    http = fake.http()
    engine = make(fake, lambda http: TensorTransport(http, device="cpu", num_ranks=2))
    await engine.update_weights(weights, policy_version=1)
    await http.close()
    for named in received[0]:
        assert [name for name, _ in named] == ["a", "b"]
        assert torch.equal(named[1][1], torch.arange(3.0))


@pytest.mark.parametrize(
    "faults",
    [
        {"update_answer": {"success": False, "message": "no"}},
        {"refuses": {"/update_weights_from_disk": (400, {"success": False, "message": "no"})}},
        {"refuses": {"/continue_generation": (500, {})}},
    ],
)
async def test_an_update_that_failed_leaves_unknown_weights_and_ends_the_engine(
    disk, weights, faults
):
    engine = make(FakeSglang(**faults), disk)
    with pytest.raises(BrokenServerError):
        await engine.update_weights(weights, policy_version=1)
    with pytest.raises(BrokenServerError):
        await pieces_of(engine)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"top_p": 0.9}, "before top_p=0.9"),
        ({"top_k": 5}, "top_k=5"),
        ({"stop_strings": ("end",)}, "without a tokenizer"),
        (
            {"constraint": Constraint(json_schema="{}"), "stop_ids": (7,)},
            "cannot make an answer follow a JSON schema",
        ),
        ({"returns_raw_logprobs": True, "temperature": 0.5}, "one kind of log-probabilities"),
    ],
)
async def test_what_sglang_cannot_do_is_refused_and_not_dropped(disk, sampling, reason):
    fake = FakeSglang()
    with pytest.raises(EngineError, match=reason):
        await pieces_of(make(fake, disk), **sampling)
    assert fake.paths() == []


async def test_closing_the_iterator_aborts_the_request(disk):
    fake = FakeSglang(tokens_before_pause=3)
    asked = Sampling(max_new_tokens=9, stream_interval_tokens=1)
    async with aclosing(make(fake, disk).stream(PROMPT, asked, session_id="s")) as pieces:
        async for _ in pieces:
            break
    assert fake.body("/abort_request") == {"rid": fake.body("/generate")["rid"]}


@pytest.mark.parametrize(
    ("fake", "error"),
    [
        (FakeSglang(finish_reason="abort"), EngineError),
        (FakeSglang(nan_at=1), EngineFaultError),
        (FakeSglang(refuses={"/generate": (200, {"error": {"message": "full"}})}), EngineError),
        (FakeSglang(refuses={"/generate": (200, {})}), EngineError),
    ],
)
async def test_answers_that_mean_nothing_are_errors(disk, fake, error):
    with pytest.raises(error):
        await pieces_of(make(fake, disk))


async def test_scores_are_those_of_the_prompt(disk):
    assert await make(FakeSglang(), disk).score([5, 6, 7]) == [0.0, -0.06, -0.07]


async def test_health_reads_the_metrics(disk):
    health = await make(FakeSglang(), disk).health()
    assert (health.num_running, health.num_waiting, health.num_sampled_tokens) == (2, 1, 50)
    assert (health.num_prompt_tokens, health.num_cached_tokens) == (30, 10)


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({}, "start it with --enable-metrics"),
        (
            {"enable_metrics": True, "enable_deterministic_inference": True},
            "start it without --enable-deterministic-inference",
        ),
    ],
)
async def test_a_server_that_was_started_otherwise_is_refused(disk, info, reason):
    fake = FakeSglang(info=info)
    http = fake.http()
    server = SglangServer(http, disk(http), on_update="continue")
    with pytest.raises(ConfigError, match=reason):
        await server.check(deterministic=CONFIG.deterministic)


def test_the_recipe_chooses_how_weights_travel(tmp_path):
    with transport_of(CONFIG, FakeSglang().http(), tmp_path) as transport:
        assert isinstance(transport, DiskTransport)
    tensor = CONFIG.model_copy(update={"update_from": "tensor"})
    with transport_of(tensor, FakeSglang().http(), tmp_path) as transport:
        assert isinstance(transport, TensorTransport)
