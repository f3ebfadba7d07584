"""What one request holds never ends the engine that others sample from."""

import asyncio
import os

import numpy as np
import pytest
import torch

from longarc.config.engine import EngineConfig
from longarc.config.model import LlamaConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.remote import RemoteEngine
from longarc.engine.sampler import uniforms
from longarc.engine.seeds import seed_of_request
from longarc.engine.wire import ScoreRequest, StreamRequest, from_plain
from longarc.errors import (
    ContractError,
    EngineFaultError,
    EngineLostError,
    EngineRequestError,
    WeightsRefusedError,
)
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.records.sampling import MAX_SEED, MIN_TEMPERATURE, Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

MODEL = LlamaConfig(
    vocab_size=64, hidden_size=48, max_position_embeddings=256, initializer_range=0.2
)


def make_engine(*, seed=0, **settings) -> EmbeddedEngine:
    settings = {"cache_tokens": 2048, "max_running": 2, **settings}
    return EmbeddedEngine(
        build_model(MODEL, seed=0), EngineConfig(**settings), max_context_tokens=64, seed=seed
    )


async def complete(engine, **sampling):
    asked = Sampling(**{"max_new_tokens": 4, **sampling})
    return [piece async for piece in engine.stream([1, 2], asked, session_id="s")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 2**64),
        ("temperature", 1e-300),
        ("temperature", float("nan")),
        ("stop_ids", (2**63,)),
        ("stop_ids", (-1,)),
    ],
)
def test_a_value_that_no_step_can_compute_with_is_refused_by_name_and_value(name, value):
    with pytest.raises(ContractError, match=rf"{name}=\(?{value}") as caught:
        Sampling(max_new_tokens=1, **{name: value})
    assert "has to be" in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_over_the_wire_it_is_the_requests_fault(seed):
    body = {
        "prompt_ids": [1],
        "session_id": "s",
        "sampling": {"max_new_tokens": 1, "seed": seed},
    }
    with pytest.raises(EngineRequestError, match=f"seed={seed}"):
        from_plain(StreamRequest, body)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": MAX_SEED},
        {"temperature": MIN_TEMPERATURE},
        {"temperature": 1e300},
        {"top_k": 2**63},
        {"stop_ids": (MAX_SEED,)},
        {"stream_interval_tokens": 2**63},
    ],
)
async def test_every_value_that_is_allowed_can_be_sampled_with(truncation, extreme):
    async with make_engine() as engine:
        pieces = await complete(engine, **(truncation | extreme))
        assert (await engine.health()).is_ready
    assert sum(len(piece.token_ids) for piece in pieces) == 4
    assert all(value <= 0 for piece in pieces for value in piece.logprobs)


async def test_a_request_without_a_seed_gets_one_however_large_the_engines_is():
    uniforms([seed_of_request(MAX_SEED, 1)], [0])
    async with make_engine(seed=MAX_SEED) as engine:
        assert await complete(engine)


async def test_what_cannot_be_computed_is_a_fault_of_its_step_and_who_waits_may_go_elsewhere(
    monkeypatch, caplog
):
    def broken(*_, **__):
        raise OverflowError("too large")

    monkeypatch.setattr("longarc.engine.decoding.Decoding.decode", broken)
    async with make_engine(max_running=1) as engine:
        computed, waiting = await asyncio.gather(
            complete(engine), complete(engine), return_exceptions=True
        )
        assert type(computed) is EngineFaultError
        assert type(waiting) is EngineLostError
        with pytest.raises(EngineLostError, match="OverflowError: too large"):
            await complete(engine)
        await engine.failed()
        assert "too large" in str(engine.failure)
        assert not (await engine.health()).is_ready
    assert "no request can be answered any more: the engine failed: OverflowError" in caplog.text


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError("no disk")])
async def test_what_the_machine_lacks_another_engine_may_have(monkeypatch, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("longarc.engine.decoding.Decoding.decode", broken)
    async with make_engine() as engine:
        with pytest.raises(EngineLostError, match="the engine failed"):
            await complete(engine)


async def test_a_path_that_cannot_be_one_refuses_the_weights_and_nothing_else():
    async with make_engine() as engine:
        with pytest.raises(WeightsRefusedError, match="null byte"):
            await engine.update_weights(WeightSource(path="a\0b", sha256="0"), policy_version=1)
        assert await complete(engine)


async def test_a_path_to_what_never_ends_refuses_the_weights_and_the_next_ones_come(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "1.safetensors"
    save_weights(build_model(MODEL, seed=1), path)
    async with asyncio.timeout(20), make_engine() as engine:
        for endless in (tmp_path / "pipe", "/dev/zero"):
            with pytest.raises(WeightsRefusedError, match="not a regular file"):
                await engine.update_weights(
                    WeightSource(path=str(endless), sha256="0"), policy_version=1
                )
        await engine.update_weights(
            WeightSource(path=str(path), sha256=file_sha256(path)), policy_version=1
        )


@pytest.mark.parametrize("bad", [1.0, 1.5, float("nan"), "1", None])
async def test_an_id_that_is_no_whole_number_is_refused_and_never_rounded(bad):
    async def ask(engine):
        async for _ in engine.stream([1, bad], Sampling(max_new_tokens=1), session_id="s"):
            pass

    async with make_engine() as engine, RemoteEngine("http://nobody", api_key="k") as remote:
        for there in (engine, remote):
            for asking in (ask(there), there.score([1, bad])):
                with pytest.raises(EngineRequestError, match="ids have to be whole numbers"):
                    await asking
        # Whatever is a whole number is one, of whichever library.
        scores = await engine.score([np.int64(1), torch.tensor(2)])
        assert scores == await engine.score([1, 2])


async def test_a_score_that_is_no_number_is_a_fault_and_never_an_answer():
    model = build_model(MODEL, seed=0)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    async with EmbeddedEngine(model, EngineConfig(), max_context_tokens=64) as engine:
        with pytest.raises(EngineFaultError, match="token 1 of the 3 to score is nan"):
            await engine.score([1, 2, 3])


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError, EngineFaultError), (MemoryError, EngineLostError)]
)
async def test_what_raises_while_a_score_is_computed_is_a_typed_error(monkeypatch, error, kind):
    def broken(*_, **__):
        raise error("no luck")

    async with make_engine() as engine:
        monkeypatch.setattr("longarc.engine.embedded.token_logprobs", broken)
        with pytest.raises(kind, match=r"scoring 2 tokens: .*no luck"):
            await engine.score([1, 2])


@pytest.mark.parametrize(
    ("token_ids", "temperature", "message"),
    [
        ([], 1.0, "nothing to score"),
        ([1, 2, 99999], 1.0, r"span 1\.\.99999, but the vocabulary is 0\.\.63"),
        ([-3], 1.0, r"span -3\.\.-3"),
        ([2**63], 1.0, f"{2**63}"),
        ([1] * 65, 1.0, "cannot score 65 tokens"),
        ([1, 2], 0.0, r"temperature=0\.0 has to be at least 1e-06 and finite"),
        ([1, 2], -1.0, r"temperature=-1\.0 has to be"),
        ([1, 2], 1e-300, r"temperature=1e-300 has to be"),
        ([1, 2], float("nan"), "temperature=nan has to be"),
        ([1, 2], float("inf"), "temperature=inf has to be"),
    ],
)
async def test_what_cannot_be_scored_is_refused_as_the_requests_fault(
    token_ids, temperature, message
):
    async with make_engine() as engine:
        with pytest.raises(EngineRequestError, match=message):
            await engine.score(token_ids, temperature=temperature)
        assert len(await engine.score([1, 2], temperature=MIN_TEMPERATURE)) == 2


async def test_a_closed_engine_scores_nothing_and_another_one_may():
    engine = make_engine()
    async with engine:
        pass
    with pytest.raises(EngineLostError, match="closed"):
        await engine.score([1, 2])


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (StreamRequest, {}, r"StreamRequest: missing \['prompt_ids', 'sampling', 'session_id'\]"),
        (StreamRequest, {"prompt_ids": [], "session_id": "s", "sampling": {}}, "max_new_tokens"),
        (ScoreRequest, {}, r"ScoreRequest: missing \['token_ids'\]; allowed are .*temperature"),
    ],
)
def test_missing_keys_are_named_and_not_pythons_arguments(kind, body, message):
    with pytest.raises(EngineRequestError, match=message) as refused:
        from_plain(kind, body)
    assert "__init__" not in str(refused.value)
