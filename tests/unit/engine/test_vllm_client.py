import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from fake_engine_servers import FakeVllm
from longarc.engine.served import BrokenServerError, ServedEngine, ServedLimits
from longarc.engine.vllm import VllmServer
from longarc.errors import ConfigError, EngineError, EngineFaultError, EngineRequestError
from longarc.records.constraint import Constraint
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

LIMITS = ServedLimits(vocab_size=100, max_context_tokens=64, max_requests=2, update_timeout_s=30.0)
PROMPT = [5, 6, 7]


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"weights")
    return WeightSource(path=str(path), sha256=file_sha256(path))


def make(fake, *, on_update="continue", limits=LIMITS):
    fake.version = "0"
    server = VllmServer(fake.http(), on_update=on_update)
    return ServedEngine(server, limits, policy_version=0, seed=3)


async def pieces_of(engine, prompt=PROMPT, **sampling):
    asked = Sampling(**{"max_new_tokens": 6, **sampling})
    return [piece async for piece in engine.stream(prompt, asked, session_id="s")]


async def test_a_completion_comes_with_log_probabilities_version_and_cache_use():
    fake = FakeVllm()
    (piece,) = await pieces_of(make(fake), temperature=0.5, top_p=0.9, stop_ids=(2,), seed=11)
    assert piece.token_ids == (8, 9, 10, 11, 12, 13)
    assert piece.logprobs == tuple(-t / 100 for t in piece.token_ids)
    assert (piece.policy_version, piece.finish_reason, piece.num_cached_tokens) == (0, "length", 3)
    body = fake.body("/inference/v1/generate")
    assert body["token_ids"] == PROMPT
    wanted = {
        "max_tokens": 6,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "seed": 11,
        "logprobs": 0,
    }
    assert body["sampling_params"] | wanted == body["sampling_params"]


async def test_pieces_come_early_where_they_are_asked_for():
    pieces = await pieces_of(make(FakeVllm()), stream_interval_tokens=2, max_new_tokens=5)
    assert [piece.token_ids for piece in pieces] == [(8, 9), (10, 11), (12,)]
    assert [piece.finish_reason for piece in pieces] == [None, None, "length"]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (0, [((8, 9, 10, 11), 0), ((12, 13, 14, 15), 1)]),
        # After the update begins nothing is handed over until the server says what sampled it.
        (3, [((8, 9, 10), 0), ((11,), 0), ((12, 13, 14, 15), 1)]),
    ],
)
async def test_tokens_before_and_after_an_update_carry_their_versions(weights, interval, expected):
    fake = FakeVllm(tokens_before_pause=4)
    engine = make(fake)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            pieces_of(engine, max_new_tokens=8, stream_interval_tokens=interval)
        )
        while "/inference/v1/generate" not in fake.paths():
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        await engine.update_weights(weights, policy_version=1)
    assert [(p.token_ids, p.policy_version) for p in running.result()] == expected


@pytest.mark.parametrize(
    ("on_update", "mode", "recomputes"),
    [("continue", "keep", False), ("recompute", "keep", True), ("finish", "wait", False)],
)
async def test_an_update_happens_while_the_server_is_paused(weights, on_update, mode, recomputes):
    fake = FakeVllm()
    engine = make(fake, on_update=on_update)
    await engine.update_weights(weights, policy_version=4)
    reset = ["/reset_prefix_cache"] if recomputes else []
    assert fake.paths() == [
        "/pause",
        "/collective_rpc",
        *reset,
        "/update_weight_version",
        "/resume",
    ]
    assert fake.body("/pause")["mode"] == mode
    assert fake.body("/collective_rpc")["args"] == [weights.path]
    assert fake.version == "4"
    assert (await engine.health()).policy_version == 4


async def test_requests_after_an_update_share_no_cache_with_those_before(weights):
    fake = FakeVllm()
    engine = make(fake)
    await pieces_of(engine)
    before = fake.body("/inference/v1/generate")["cache_salt"]
    await engine.update_weights(weights, policy_version=1)
    await pieces_of(engine)
    assert fake.body("/inference/v1/generate")["cache_salt"] != before


async def test_refused_weights_leave_the_old_version_in_use(weights):
    fake = FakeVllm(load_results=[{"error": "tensor 'x' has shape [3]"}])
    engine = make(fake)
    with pytest.raises(EngineError, match=r"weights 1 were not loaded: tensor 'x'"):
        await engine.update_weights(weights, policy_version=1)
    assert fake.paths()[-1] == "/resume"
    assert (await pieces_of(engine))[0].policy_version == 0


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"load_results": [{"error": "x", "is_broken": True}]}, "not in use everywhere"),
        ({"load_results": [{"seconds": 1.0}, {"error": "x"}]}, "not in use everywhere"),
        ({"refuses": {"/collective_rpc": (500, {})}}, "--worker-extension-cls"),
        ({"refuses": {"/update_weight_version": (500, {})}}, "did not go on with weights 1"),
        ({"refuses": {"/resume": (500, {})}}, "did not go on with weights 1"),
    ],
)
async def test_a_server_of_unknown_weights_serves_nobody_any_more(weights, faults, reason):
    engine = make(FakeVllm(**faults))
    with pytest.raises(BrokenServerError, match=reason):
        await engine.update_weights(weights, policy_version=1)
    with pytest.raises(BrokenServerError, match=reason):
        await pieces_of(engine)
    assert not (await engine.health()).is_ready


async def test_a_file_that_is_not_the_announced_one_never_reaches_the_server(weights):
    fake = FakeVllm()
    with pytest.raises(EngineError, match="publish again"):
        await make(fake).update_weights(
            WeightSource(path=weights.path, sha256="0" * 64), policy_version=1
        )
    assert fake.paths() == []


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"temperature": 0.004}, "samples at temperature 0.01 where 0.004 is asked"),
        ({"stop_strings": ("end",)}, "without a tokenizer"),
        (
            {"constraint": Constraint(json_schema="{}"), "stop_ids": (7,)},
            "cannot make an answer follow a JSON schema",
        ),
        ({"returns_raw_logprobs": True, "temperature": 0.5}, "one kind of log-probabilities"),
        ({"max_new_tokens": 62}, "is 65 tokens"),
    ],
)
async def test_what_vllm_cannot_do_is_refused_and_not_dropped(sampling, reason):
    fake = FakeVllm()
    with pytest.raises(EngineError, match=reason):
        await pieces_of(make(fake), **sampling)
    assert fake.paths() == []


@pytest.mark.parametrize("prompt", [[], [3, 100], [-1]])
async def test_prompts_that_have_no_meaning_are_refused(prompt):
    with pytest.raises(EngineError):
        await pieces_of(make(FakeVllm()), prompt=prompt)


async def test_truncated_sampling_that_has_to_say_what_was_kept_needs_a_server_that_says_it():
    asked = {"max_new_tokens": 2, "top_k": 3, "returns_kept_ids": True}
    with pytest.raises(EngineError, match="Start the server so that it returns them"):
        await pieces_of(make(FakeVllm()), **asked)
    (piece,) = await pieces_of(make(FakeVllm(sampling_mask=[[9, 8], [9]])), **asked)
    assert piece.kept_ids == ((8, 9), (9,))


async def test_nothing_is_kept_apart_where_nothing_is_left_out():
    (piece,) = await pieces_of(
        make(FakeVllm()), max_new_tokens=2, returns_kept_ids=True, returns_raw_logprobs=True
    )
    assert piece.kept_ids == ((), ())
    assert piece.raw_logprobs == piece.logprobs


async def test_greedy_tokens_have_log_probability_zero():
    (piece,) = await pieces_of(make(FakeVllm()), temperature=0.0, max_new_tokens=2)
    assert piece.logprobs == (0.0, 0.0)


async def test_a_log_probability_that_is_no_number_is_a_fault_of_the_engine():
    with pytest.raises(EngineFaultError, match="sampled token 2"):
        await pieces_of(make(FakeVllm(nan_at=2)))


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeVllm(finish_reason="abort"), "somebody else aborted it"),
        (FakeVllm(refuses={"/inference/v1/generate": (500, {"error": "dead"})}), "answered 500"),
        (FakeVllm(refuses={"/inference/v1/generate": (200, {"choices": [{}]})}), "cannot be read"),
    ],
)
async def test_answers_that_mean_nothing_are_errors(fake, reason):
    with pytest.raises(EngineError, match=reason):
        await pieces_of(make(fake))


async def test_weights_that_somebody_else_put_there_are_an_error():
    fake = FakeVllm()
    engine = make(fake)
    fake.version = "theirs"
    with pytest.raises(EngineError, match="LongArc did not put there"):
        await pieces_of(engine)


async def test_closing_the_iterator_closes_the_connection():
    fake = FakeVllm(tokens_before_pause=3)
    asked = Sampling(max_new_tokens=9, stream_interval_tokens=1)
    async with aclosing(make(fake).stream(PROMPT, asked, session_id="s")) as pieces:
        async for _ in pieces:
            break
    assert fake.num_left == 1


async def test_a_full_engine_pushes_back():
    fake = FakeVllm(tokens_before_pause=1)
    engine = make(fake)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(pieces_of(engine)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="2 requests are in flight already"):
            await pieces_of(engine)
        fake.was_resumed.set()
    assert all(task.result() for task in running)


async def test_scores_start_with_zero_and_are_at_temperature_1_only():
    engine = make(FakeVllm())
    assert await engine.score([5, 6, 7]) == [0.0, -0.06, -0.07]
    with pytest.raises(EngineRequestError, match="at temperature 1 only"):
        await engine.score([5, 6], temperature=0.5)
    with pytest.raises(EngineRequestError, match="samples one more"):
        await engine.score([1] * 64)
    with pytest.raises(EngineRequestError, match="nothing to score"):
        await engine.score([])
    with pytest.raises(EngineRequestError, match=r"span -3\.\.-3"):
        await engine.score([-3])


async def test_health_adds_up_the_servers_engines():
    health = await make(FakeVllm()).health()
    assert (health.num_running, health.num_waiting) == (3, 4)
    assert (health.num_sampled_tokens, health.num_prompt_tokens) == (1500, 80)
    assert (health.num_cached_tokens, health.is_ready) == (16, True)
    gone = FakeVllm(refuses={"/metrics": (503, {})})
    assert not (await make(gone).health()).is_ready


async def test_a_server_with_other_log_probabilities_is_refused():
    server = VllmServer(FakeVllm(logprobs_mode="raw_logprobs").http(), on_update="continue")
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        await server.check()
    assert await server.is_up()


async def test_a_field_of_sampling_that_the_client_was_not_taught_is_refused():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Later(Sampling):
        num_beams: int = 1

    fake = FakeVllm()
    with pytest.raises(EngineError, match="cannot honour num_beams=4"):
        async for _ in make(fake).stream(
            PROMPT, Later(max_new_tokens=2, num_beams=4), session_id="s"
        ):
            pass
    assert fake.paths() == []


async def test_what_becomes_of_one_sequence_at_an_update_is_not_the_requests_to_say():
    fake = FakeVllm()
    with pytest.raises(EngineError, match="cannot honour on_update='finish'"):
        async for _ in make(fake).stream(
            PROMPT, Sampling(max_new_tokens=2, on_update="finish"), session_id="s"
        ):
            pass
    assert fake.paths() == []
