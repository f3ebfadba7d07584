import asyncio
from contextlib import aclosing

import pytest
import torch
from safetensors.torch import save_file

from fake_engine_servers import FakeSglang
from fake_server_pairs import BOOTSTRAP_PORT, sglang_parts
from longarc.config.engine_clients import SglangConfig
from longarc.engine.served import BrokenServerError, ServedEngine, ServedLimits
from longarc.engine.sglang import SglangServer
from longarc.engine.sglang_pair import SglangPair
from longarc.engine.sglang_weights import DiskTransport
from longarc.errors import ConfigError, EngineError
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

LIMITS = ServedLimits(vocab_size=100, max_context_tokens=64, max_requests=8, update_timeout_s=30.0)
PROMPT = [5, 6, 7]
UPDATE = "/update_weights_from_disk"


def config(prefill="http://prefill:1"):
    return SglangConfig(
        kind="sglang", url="http://decode:1", prefill_url=prefill, on_update="finish"
    )


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(2, 2)}, path)
    return WeightSource(path=str(path), sha256=file_sha256(path))


@pytest.fixture
def server_of(tmp_path):
    model = tmp_path / "model"
    model.mkdir()

    def make(fake):
        http = fake.http()
        transport = DiskTransport(http, model_directory=model, directory=tmp_path)
        return SglangServer(http, transport, on_update="finish")

    return make


async def paired(server_of, prefill, decode, settings):
    return await SglangPair.found(
        server_of(prefill),
        server_of(decode),
        prefill_url=settings.prefill_url,
        deterministic=settings.deterministic,
    )


@pytest.fixture
def open_engine(server_of):
    async def make(prefill, decode):
        pair = await paired(server_of, prefill, decode, config())
        await pair.label(0)
        prefill.calls.clear()
        decode.calls.clear()
        return ServedEngine(pair, LIMITS, policy_version=0, seed=3)

    return make


async def pieces_of(engine, **sampling):
    asked = Sampling(**{"max_new_tokens": 6, **sampling})
    return [piece async for piece in engine.stream(PROMPT, asked, session_id="s")]


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def test_both_servers_get_the_same_request_and_the_decode_server_answers(open_engine):
    prefill, decode = sglang_parts()
    (piece,) = await pieces_of(await open_engine(prefill, decode), temperature=0.5, seed=11)
    assert piece.token_ids == (8, 9, 10, 11, 12, 13)
    assert (piece.policy_version, piece.finish_reason) == (0, "length")
    assert piece.num_cached_tokens == 3  # the prefill server's; all is cached to the other
    assert prefill.body("/generate") == decode.body("/generate")
    assert decode.body("/generate")["bootstrap_host"] == "prefill"
    assert decode.body("/generate")["bootstrap_port"] == BOOTSTRAP_PORT


async def test_no_two_requests_meet_in_one_room(open_engine):
    prefill, decode = sglang_parts()
    engine = await open_engine(prefill, decode)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(pieces_of(engine))
    await engine.score(PROMPT)
    rooms = [body["bootstrap_room"] for path, body in prefill.calls if path == "/generate"]
    assert len(set(rooms)) == 9
    assert all(0 <= room < 2**63 for room in rooms)


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_a_stream_comes_from_the_decode_server(open_engine, is_incremental):
    prefill, decode = sglang_parts(is_incremental=is_incremental)
    engine = await open_engine(prefill, decode)
    pieces = await pieces_of(engine, stream_interval_tokens=2, max_new_tokens=5)
    assert [piece.token_ids for piece in pieces] == [(8, 9), (10, 11), (12,)]


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("broken", ["prefill", "decode"])
@pytest.mark.parametrize("answer", [(500, {}), (200, {"error": {"message": "out of memory"}})])
async def test_a_request_that_fails_at_one_server_waits_at_neither(
    open_engine, broken, interval, answer
):
    prefill, decode = sglang_parts()
    engine = await open_engine(prefill, decode)
    failing, other = (prefill, decode) if broken == "prefill" else (decode, prefill)
    failing.refuses["/generate"] = answer
    with pytest.raises(EngineError):
        await pieces_of(engine, stream_interval_tokens=interval)
    rid = {"rid": prefill.body("/generate")["rid"]}
    assert prefill.body("/abort_request") == decode.body("/abort_request") == rid
    assert other.num_given_up == 1
    failing.refuses.clear()
    assert await pieces_of(engine)


async def test_a_prefill_that_means_nothing_is_an_error(open_engine):
    prefill, decode = sglang_parts()
    engine = await open_engine(prefill, decode)
    prefill.refuses["/generate"] = (200, {})
    with pytest.raises(EngineError, match="prefill cannot be read"):
        await pieces_of(engine)


async def test_a_prefill_that_somebody_aborted_is_an_error(open_engine):
    prefill, decode = sglang_parts()
    prefill.finish_reason = "abort"
    with pytest.raises(EngineError, match="prefill server aborted"):
        await pieces_of(await open_engine(prefill, decode))


async def test_closing_the_iterator_aborts_the_request_at_both(open_engine):
    prefill, decode = sglang_parts(tokens_before_pause=3)
    engine = await open_engine(prefill, decode)
    asked = Sampling(max_new_tokens=9, stream_interval_tokens=1)
    async with aclosing(engine.stream(PROMPT, asked, session_id="s")) as pieces:
        async for _ in pieces:
            break
    rid = {"rid": prefill.body("/generate")["rid"]}
    assert prefill.body("/abort_request") == decode.body("/abort_request") == rid


async def test_an_abort_that_one_server_does_not_take_reaches_the_other(open_engine):
    prefill, decode = sglang_parts()
    engine = await open_engine(prefill, decode)
    prefill.refuses |= {"/generate": (500, {}), "/abort_request": (500, {})}
    with pytest.raises(EngineError, match="500"):
        await pieces_of(engine)
    assert "/abort_request" in decode.paths()


async def test_an_update_reaches_both_once_nothing_is_in_flight_at_either(open_engine, weights):
    prefill, decode = sglang_parts(tokens_before_pause=4)
    engine = await open_engine(prefill, decode)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pieces_of(engine, max_new_tokens=8))
        await until(lambda: "/generate" in decode.paths())
        update = tasks.create_task(engine.update_weights(weights, policy_version=1))
        await asyncio.sleep(0.05)
        assert UPDATE not in [*prefill.paths(), *decode.paths()]
        decode.was_resumed.set()
        await update
    assert {piece.policy_version for piece in running.result()} == {0}
    assert (prefill.version, decode.version) == ("1", "1")
    assert prefill.body(UPDATE)["flush_cache"]
    assert decode.body(UPDATE)["flush_cache"]
    assert {piece.policy_version for piece in await pieces_of(engine)} == {1}


@pytest.mark.parametrize("broken", ["prefill", "decode"])
@pytest.mark.parametrize("answer", [(500, {}), (200, {"success": False, "message": "no"})])
async def test_an_update_that_failed_at_one_server_ends_the_engine(
    open_engine, weights, broken, answer
):
    prefill, decode = sglang_parts()
    engine = await open_engine(prefill, decode)
    failing = prefill if broken == "prefill" else decode
    failing.refuses[UPDATE] = answer
    with pytest.raises(BrokenServerError, match="which it has now is unknown"):
        await engine.update_weights(weights, policy_version=1)
    assert (UPDATE in decode.paths()) == (broken == "decode")
    with pytest.raises(BrokenServerError):
        await pieces_of(engine)
    assert not (await engine.health()).is_ready


async def test_a_prefill_by_other_weights_than_the_decode_server_has_is_an_error(
    open_engine, weights
):
    prefill, decode = sglang_parts()
    engine = await open_engine(prefill, decode)
    await engine.update_weights(weights, policy_version=1)
    prefill.version = "default"  # started again by whoever watches over it
    with pytest.raises(EngineError, match="weights 'default', the decode server has 1"):
        await pieces_of(engine)


async def test_scores_are_the_prefill_servers(open_engine):
    prefill, decode = sglang_parts()
    assert await (await open_engine(prefill, decode)).score([5, 6, 7]) == [0.0, -0.06, -0.07]
    assert "/generate" in decode.paths()  # without which a prefill server waits


async def test_health_is_that_of_both(open_engine):
    prefill, decode = sglang_parts()
    engine = await open_engine(prefill, decode)
    health = await engine.health()
    assert (health.num_running, health.num_waiting, health.num_sampled_tokens) == (4, 2, 50)
    assert (health.num_prompt_tokens, health.num_cached_tokens) == (30, 10)
    prefill.refuses["/metrics"] = (503, {})
    assert not (await engine.health()).is_ready


@pytest.mark.parametrize(
    ("part", "info", "reason"),
    [
        ("prefill", {"disaggregation_mode": "decode"}, "mode decode, it needs prefill"),
        ("decode", {"disaggregation_mode": "null"}, "mode null, it needs decode"),
        ("prefill", {"enable_metrics": False}, "start it with --enable-metrics"),
        ("prefill", {"disaggregation_bootstrap_port": None}, "--disaggregation-bootstrap-port"),
    ],
)
async def test_servers_without_the_part_that_the_recipe_gives_them_are_refused(
    server_of, part, info, reason
):
    prefill, decode = sglang_parts()
    (prefill if part == "prefill" else decode).info |= info
    with pytest.raises(ConfigError, match=reason):
        await paired(server_of, prefill, decode, config())


async def test_half_of_a_pair_is_not_taken_for_a_server(server_of):
    alone = SglangConfig(kind="sglang", url="http://decode:1")
    with pytest.raises(ConfigError, match="mode decode, it needs null"):
        await server_of(sglang_parts()[1]).check(deterministic=alone.deterministic)
    await server_of(FakeSglang()).check(deterministic=alone.deterministic)


async def test_an_ipv6_address_is_told_in_brackets(server_of):
    prefill, decode = sglang_parts(host="[::1]")
    pair = await paired(server_of, prefill, decode, config("http://[::1]:3"))
    assert await pair.score([5, 6]) == [0.0, -0.06]
