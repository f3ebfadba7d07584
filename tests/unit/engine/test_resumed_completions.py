"""Completions that go on elsewhere, and faults, with real models behind router and server."""

import asyncio

import pytest

from longarc.config.engine import EngineConfig
from longarc.config.model import GlmMoeDsaConfig, LlamaConfig
from longarc.config.routing import RoutingConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.remote import RemoteEngine
from longarc.engine.router import Router
from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.token_text import TokenText
from longarc.engine.wire import EngineDescription
from longarc.errors import EngineRequestError, WeightsRefusedError
from longarc.gateway.server import bound_socket, serving
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

NANO = GlmMoeDsaConfig(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=2,
    index_topk=16,
    max_position_embeddings=256,
    initializer_range=0.2,
)
LLAMA = LlamaConfig(vocab_size=64, hidden_size=48, num_hidden_layers=2, max_position_embeddings=256)
PROMPT = [5, 9, 2, 33]


def make_engine(config=NANO, *, seed=0) -> EmbeddedEngine:
    settings = EngineConfig(cache_tokens=4096, max_running=8)
    return EmbeddedEngine(build_model(config, seed=seed), settings, max_context_tokens=128)


async def complete(engine, prompt=PROMPT, *, session="s", **sampling):
    asked = Sampling(**{"max_new_tokens": 40, "seed": 7, **sampling})
    ids, logprobs = [], []
    async for piece in engine.stream(prompt, asked, session_id=session):
        ids += piece.token_ids
        logprobs += piece.logprobs
    return ids, logprobs


@pytest.mark.parametrize("config", [NANO, LLAMA])
@pytest.mark.parametrize("extra", [{}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}])
async def test_what_is_left_of_a_completion_is_what_would_have_followed(config, extra):
    async with make_engine(config) as engine:
        whole, logprobs = await complete(engine, **extra)
        for begun in (1, 17, 39):
            rest, others = await complete(
                engine,
                [*PROMPT, *whole[:begun]],
                session=str(begun),
                max_new_tokens=40 - begun,
                num_sampled_before=begun,
                **extra,
            )
            assert rest == whole[begun:]
            assert others == pytest.approx(logprobs[begun:], abs=1e-5)
    if extra.get("temperature") != 0.0:
        assert len(set(whole)) > 8


async def test_without_the_position_the_rest_would_draw_the_first_numbers_again():
    async with make_engine() as engine:
        whole, _ = await complete(engine)
        rest, _ = await complete(engine, [*PROMPT, *whole[:17]], max_new_tokens=23)
    assert rest != whole[17:]


async def test_a_stop_string_that_began_elsewhere_is_found():
    def token_bytes(token_id: int) -> bytes:
        return bytes([48 + token_id])

    settings = EngineConfig(cache_tokens=4096, max_running=8)
    async with EmbeddedEngine(
        build_model(NANO, seed=0), settings, max_context_tokens=128, text=TokenText(token_bytes)
    ) as engine:
        whole, _ = await complete(engine)
        stop = b"".join(map(token_bytes, whole[15:19])).decode()
        stopped, _ = await complete(engine, session="t", stop_strings=(stop,))
        assert stopped == whole[:19]
        rest, _ = await complete(
            engine,
            [*PROMPT, *whole[:17]],
            max_new_tokens=23,
            num_sampled_before=17,
            stop_strings=(stop,),
        )
        assert rest == whole[17:19]
        with pytest.raises(EngineRequestError, match="are to be the end of a prompt that has 4"):
            await complete(engine, num_sampled_before=5)


async def test_an_engine_that_closes_under_its_requests_loses_none():
    async with make_engine() as alone:
        expected = [await complete(alone, session=f"s{i}", seed=i) for i in range(12)]
    async with make_engine() as stays:
        leaves = make_engine()
        engines = {"a": stays, "b": leaves}
        async with leaves, Router(engines, RoutingConfig(keep_every_tokens=4)) as router:
            await router.health()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(complete(router, session=f"s{i}", seed=i)) for i in range(12)
                ]
                while (await leaves.health()).num_sampled_tokens < 20:
                    await asyncio.sleep(0)
                await leaves.close()
            assert (await stays.health()).num_running == 0
    for (ids, logprobs), (wanted, wanted_logprobs) in zip(
        [task.result() for task in running], expected, strict=True
    ):
        assert ids == wanted
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-5)


def source(path, config=NANO, *, seed=1) -> WeightSource:
    save_weights(build_model(config, seed=seed), str(path))
    return WeightSource(path=str(path), sha256=file_sha256(path))


async def test_bad_weights_and_bad_requests_over_http_change_nothing(tmp_path):
    wrong_shape = source(tmp_path / "shape", NANO.model_copy(update={"hidden_size": 32}))
    wrong_digest = WeightSource(path=wrong_shape.path, sha256="0" * 64)
    whole = source(tmp_path / "whole")
    half = tmp_path / "half"
    half.write_bytes((tmp_path / "whole").read_bytes()[:-1000])
    half_announced_whole = WeightSource(path=str(half), sha256=whole.sha256)
    half_as_it_is = WeightSource(path=str(half), sha256=file_sha256(half))
    missing = WeightSource(path=str(tmp_path / "missing"), sha256=whole.sha256)
    async with make_engine() as engine:
        door = EngineDoor(
            [engine],
            EngineDescription(model={}, attention="sparse", max_context_tokens=128, num_ranks=1),
            DoorSettings(api_key="k"),
        )
        async with (
            serving(door.app(), bound_socket()) as address,
            RemoteEngine(address, api_key="k") as remote,
        ):
            before = await complete(remote)
            assert before == await complete(engine, session="t")
            for bad in (wrong_shape, wrong_digest, half_announced_whole, half_as_it_is, missing):
                with pytest.raises(WeightsRefusedError, match="weights 9 were not loaded"):
                    await remote.update_weights(bad, policy_version=9)
            for prompt, message in [([64], "0..63"), ([1] * 100, "max_context_tokens=128")]:
                with pytest.raises(EngineRequestError, match=message):
                    await complete(remote, prompt)
            assert await complete(remote, session="u") == before
            assert (await remote.health()).policy_version == 0
            await remote.update_weights(whole, policy_version=9)
            assert await complete(remote, session="v") != before
            scores = await remote.score([1, 2, 3])
            assert scores == await engine.score([1, 2, 3])
