import asyncio
from contextlib import aclosing

import pytest

from fake_server_pairs import vllm_parts
from longarc.engine.served import BrokenServerError, ServedEngine, ServedLimits
from longarc.engine.vllm import VllmServer
from longarc.engine.vllm_pair import VllmPair
from longarc.errors import ConfigError, EngineError, WeightMismatchError
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

LIMITS = ServedLimits(vocab_size=100, max_context_tokens=64, max_requests=8, update_timeout_s=30.0)
PROMPT = [5, 6, 7]
GENERATE = "/inference/v1/generate"


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"weights")
    return WeightSource(path=str(path), sha256=file_sha256(path))


def paired(prefill, decode, *, on_update="continue"):
    prefill_server = VllmServer(prefill.http(), on_update=on_update)
    decode_server = VllmServer(decode.http(), on_update=on_update)
    return VllmPair(prefill_server, decode_server, on_update=on_update, max_mean_gap=0.002)


def make(prefill, decode, **settings):
    prefill.version = decode.version = "0"
    pair = paired(prefill, decode, **settings)
    return ServedEngine(pair, LIMITS, policy_version=0, seed=3)


async def pieces_of(engine, **sampling):
    asked = Sampling(**{"max_new_tokens": 6, **sampling})
    return [piece async for piece in engine.stream(PROMPT, asked, session_id="s")]


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def test_the_decode_server_gets_what_the_prefill_server_says_of_its_cache():
    prefill, decode = vllm_parts()
    (piece,) = await pieces_of(make(prefill, decode), temperature=0.5, stop_ids=(8,), seed=11)
    assert piece.token_ids == (8, 9, 10, 11, 12, 13)
    assert (piece.policy_version, piece.finish_reason) == (0, "length")
    assert piece.num_cached_tokens == 3  # the prefill server's; all is cached to the other
    assert (prefill.computed, decode.computed) == ([PROMPT], [])
    asked, taken = prefill.body(GENERATE), decode.body(GENERATE)
    assert asked["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert taken["kv_transfer_params"]["remote_engine_id"] == "prefill"
    # A first token that is a stop id ends the completion, and must not end the prefill otherwise than any.
    assert asked["sampling_params"] == taken["sampling_params"] | {
        "max_tokens": 1,
        "stop_token_ids": [],
    }
    assert asked["cache_salt"] == taken["cache_salt"]


async def test_a_stream_comes_from_the_decode_server():
    prefill, decode = vllm_parts()
    pieces = await pieces_of(make(prefill, decode), stream_interval_tokens=2, max_new_tokens=5)
    assert [piece.token_ids for piece in pieces] == [(8, 9), (10, 11), (12,)]
    assert "stream" not in prefill.body(GENERATE)


async def test_a_prefill_that_fails_never_reaches_the_decode_server():
    prefill, decode = vllm_parts()
    prefill.refuses[GENERATE] = (500, {"error": "dead"})
    with pytest.raises(EngineError, match="answered 500"):
        await pieces_of(make(prefill, decode))
    assert decode.paths() == []


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"refuses": {GENERATE: (500, {"error": "dead"})}}, "answered 500"),
        # What vLLM answers where the cache did not come (kv_load_failure_policy = "fail").
        ({"finish_reason": "error"}, "ended a completion with 'error'"),
    ],
)
async def test_a_decode_that_fails_is_an_error(faults, reason):
    prefill, decode = vllm_parts(**faults)
    with pytest.raises(EngineError, match=reason):
        await pieces_of(make(prefill, decode))


@pytest.mark.parametrize("interval", [0, 1])
async def test_a_prefill_server_that_keeps_no_cache_is_an_error_and_no_slower_pair(interval):
    prefill, decode = vllm_parts()
    prefill.keeps_caches = False
    with pytest.raises(EngineError, match="kept no cache"):
        await pieces_of(make(prefill, decode), stream_interval_tokens=interval)
    assert decode.paths() == []


async def test_closing_the_iterator_closes_the_connection_of_the_decode_server():
    prefill, decode = vllm_parts(tokens_before_pause=3)
    asked = Sampling(max_new_tokens=9, stream_interval_tokens=1)
    async with aclosing(make(prefill, decode).stream(PROMPT, asked, session_id="s")) as pieces:
        async for _ in pieces:
            break
    assert decode.num_left == 1


@pytest.mark.parametrize("interval", [0, 3])
async def test_tokens_before_and_after_an_update_carry_their_versions(weights, interval):
    prefill, decode = vllm_parts(tokens_before_pause=4)
    engine = make(prefill, decode)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(
            pieces_of(engine, max_new_tokens=8, stream_interval_tokens=interval)
        )
        await until(lambda: GENERATE in decode.paths())
        await engine.update_weights(weights, policy_version=1)
    versions = [p.policy_version for p in running.result() for _ in p.token_ids]
    assert versions == [0] * 4 + [1] * 4


async def test_a_cache_of_the_weights_before_serves_tokens_that_are_said_to_be_of_the_new_ones(
    weights,
):
    """The prefill ends, weights change, and only then the decode begins: all its tokens are of the new weights."""
    prefill, decode = vllm_parts()
    prefill.may_answer = asyncio.Event()
    engine = make(prefill, decode)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pieces_of(engine))
        await until(lambda: prefill.kept)
        await engine.update_weights(weights, policy_version=1)
        prefill.may_answer.set()
    assert {piece.policy_version for piece in running.result()} == {1}


async def test_both_are_stopped_before_either_changes_and_go_on_when_both_have_changed(weights):
    prefill, decode = vllm_parts()
    order = []
    prefill.calls, decode.calls = Named("prefill", order), Named("decode", order)
    engine = make(prefill, decode)
    await engine.update_weights(weights, policy_version=4)
    assert order == [
        ("prefill", "/pause"),
        ("decode", "/pause"),
        ("prefill", "/collective_rpc"),
        ("decode", "/collective_rpc"),
        ("prefill", "/update_weight_version"),
        ("decode", "/update_weight_version"),
        ("decode", "/resume"),
        ("prefill", "/resume"),
    ]
    assert (prefill.version, decode.version) == ("4", "4")


class Named(list):
    """A log of calls that says in a common one whose they are."""

    def __init__(self, name, order):
        super().__init__()
        self._name, self._order = name, order

    def append(self, call):
        self._order.append((self._name, call[0]))
        super().append(call)


async def test_finish_waits_for_requests_that_are_between_the_servers(weights):
    prefill, decode = vllm_parts()
    prefill.may_answer = asyncio.Event()
    engine = make(prefill, decode, on_update="finish")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pieces_of(engine, max_new_tokens=8))
        await until(lambda: prefill.kept)
        update = tasks.create_task(engine.update_weights(weights, policy_version=1))
        await asyncio.sleep(0.05)
        assert "/pause" not in [*prefill.paths(), *decode.paths()]
        prefill.may_answer.set()
        await update
    assert {piece.policy_version for piece in running.result()} == {0}
    assert (prefill.version, decode.version) == ("1", "1")


async def test_what_the_first_server_refuses_leaves_the_old_weights_in_use_at_both(weights):
    prefill, decode = vllm_parts()
    prefill.load_results = [{"error": "tensor 'x' has shape [3]"}]
    engine = make(prefill, decode)
    with pytest.raises(EngineError, match="weights 1 were not loaded") as refused:
        await engine.update_weights(weights, policy_version=1)
    assert not isinstance(refused.value, BrokenServerError)
    assert "/collective_rpc" not in decode.paths()
    assert prefill.paths()[-1] == decode.paths()[-1] == "/resume"
    assert (await pieces_of(engine))[0].policy_version == 0


async def test_a_server_that_cannot_be_paused_leaves_the_other_running_on_the_old_weights(weights):
    prefill, decode = vllm_parts(refuses={"/pause": (503, {})})
    engine = make(prefill, decode)
    with pytest.raises(EngineError, match="503") as refused:
        await engine.update_weights(weights, policy_version=1)
    assert not isinstance(refused.value, BrokenServerError)
    assert prefill.paths() == ["/pause", "/resume"]
    assert (await pieces_of(engine))[0].policy_version == 0


@pytest.mark.parametrize(
    ("broken", "faults", "reason"),
    [
        ("decode", {"load_results": [{"error": "x"}]}, "its decode server has not"),
        ("decode", {"refuses": {"/collective_rpc": (500, {})}}, "its decode server has not"),
        ("prefill", {"refuses": {"/collective_rpc": (500, {})}}, "--worker-extension-cls"),
        ("prefill", {"refuses": {"/update_weight_version": (500, {})}}, "did not go on"),
        ("decode", {"refuses": {"/update_weight_version": (500, {})}}, "did not go on"),
        ("prefill", {"refuses": {"/resume": (500, {})}}, "did not go on"),
        ("decode", {"refuses": {"/resume": (500, {})}}, "did not go on"),
    ],
)
async def test_an_update_that_ended_half_way_ends_the_engine(weights, broken, faults, reason):
    prefill, decode = vllm_parts()
    for name, value in faults.items():
        setattr(prefill if broken == "prefill" else decode, name, value)
    engine = make(prefill, decode)
    with pytest.raises(BrokenServerError, match=reason):
        await engine.update_weights(weights, policy_version=1)
    assert "/resume" in prefill.paths()
    assert "/resume" in decode.paths()
    with pytest.raises(BrokenServerError):
        await pieces_of(engine)


@pytest.mark.parametrize(
    ("version", "reason"), [("default", "LongArc did not put there"), ("7", r"weights \[7\]")]
)
async def test_a_prefill_by_weights_that_the_pair_never_had_is_an_error(version, reason):
    prefill, decode = vllm_parts()
    engine = make(prefill, decode)
    prefill.version = version  # started again by whoever watches over it
    with pytest.raises(EngineError, match=reason):
        await pieces_of(engine)


async def test_both_servers_score_and_have_to_agree():
    prefill, decode = vllm_parts()
    assert await make(prefill, decode).score([5, 6, 7]) == [0.0, -0.06, -0.07]
    assert prefill.computed == decode.computed == [[5, 6, 7]]
    other = {"prompt_logprobs": [None, {"6": {"logprob": -0.06}}, {"7": {"logprob": -0.08}}]}
    prefill.refuses[GENERATE] = (200, other)
    with pytest.raises(
        WeightMismatchError, match=r"differ by 0\.003333 nats .* allowed are 0\.002"
    ):
        await make(prefill, decode).score([5, 6, 7])
    other["prompt_logprobs"][2]["7"]["logprob"] = None
    with pytest.raises(WeightMismatchError, match="differ by nan"):
        await make(prefill, decode).score([5, 6, 7])


async def test_health_is_that_of_both():
    prefill, decode = vllm_parts()
    engine = make(prefill, decode)
    health = await engine.health()
    assert (health.num_running, health.num_waiting) == (6, 8)
    assert (health.num_sampled_tokens, health.num_prompt_tokens) == (1500, 80)
    prefill.refuses["/metrics"] = (503, {})
    assert not (await engine.health()).is_ready


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"kv_transfer_config": None}, "--kv-transfer-config"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
    ],
)
async def test_servers_that_were_started_otherwise_are_refused(part, setting, reason):
    parts = vllm_parts()
    await paired(*parts).check()
    for name, value in setting.items():
        setattr(parts[part], name, value)
    with pytest.raises(ConfigError, match=reason):
        await paired(*parts).check()
