import asyncio
import gc
import weakref

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.config.engine import EngineConfig
from longarc.config.model import GlmMoeDsaConfig, LlamaConfig
from longarc.errors import EngineError
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import SampledTokens, Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256
from model_cases import YARN

NANO = GlmMoeDsaConfig(
    vocab_size=64, index_topk=16, max_position_embeddings=256, initializer_range=0.2
)
SHARED = NANO.model_copy(update={"index_topk_pattern": "FSSF"})
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=48, max_position_embeddings=256, initializer_range=0.2
)

QWEN = LLAMA.model_copy(
    update={"attention_bias": "all", "qk_norm": True, "rope_scaling": YARN}, deep=True
)


def make_engine(config=NANO, *, seed=0, context=160, **settings) -> LockStepEngine:
    settings = {"cache_tokens": 2048, "max_running": 4, "max_prefill_tokens": 32, **settings}
    return LockStepEngine(
        build_model(config, seed=seed), EngineConfig(**settings), max_context_tokens=context
    )


async def complete(engine, prompt, *, session="s", **sampling) -> list[SampledTokens]:
    sampling = {"max_new_tokens": 12, "seed": 5, **sampling}
    return [
        piece async for piece in engine.stream(prompt, Sampling(**sampling), session_id=session)
    ]


def ids_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def logprobs_of(pieces):
    return [value for piece in pieces for value in piece.logprobs]


def trainer_logprobs(model, ids, *, temperature=1.0):
    ids = torch.tensor(ids)
    hidden = model(ids, Layout.documents([len(ids)])).hidden
    return token_logprobs(hidden[:-1], model.output_weight, ids[1:], temperature=temperature)[0]


@pytest.mark.parametrize("config", [NANO, SHARED, LLAMA, QWEN])
async def test_reported_logprobs_are_the_ones_a_trainer_computes(config):
    prompt = list(range(1, 41))
    async with make_engine(config) as engine:
        pieces = await complete(engine, prompt, temperature=0.7, max_new_tokens=40)
    expected = trainer_logprobs(
        build_model(config, seed=0), prompt + ids_of(pieces), temperature=0.7
    )
    torch.testing.assert_close(
        torch.tensor(logprobs_of(pieces)), expected[len(prompt) - 1 :].detach(), rtol=0, atol=1e-5
    )


async def test_company_changes_nothing_for_a_request():
    prompts = [[7, 8, 9, *range(n)] for n in (3, 30, 17, 50, 11, 29)]
    async with make_engine() as engine:
        alone = [await complete(engine, p, session=f"a{i}", seed=i) for i, p in enumerate(prompts)]
    async with make_engine() as engine:
        together = await asyncio.gather(
            *(complete(engine, p, session=f"b{i}", seed=i) for i, p in enumerate(prompts))
        )
    assert [ids_of(a) for a in alone] == [ids_of(t) for t in together]
    for a, t in zip(alone, together, strict=True):
        assert logprobs_of(a) == pytest.approx(logprobs_of(t), abs=1e-5)


async def test_the_next_turn_pays_only_for_new_tokens():
    prompt = list(range(1, 41))
    async with make_engine() as engine:
        first = ids_of(await complete(engine, prompt))
        second = await complete(engine, [*prompt, *first, 3, 4])
        assert second[0].num_cached_tokens >= len(prompt) + len(first) - 1
        health = await engine.health()
    assert health.num_cached_tokens >= len(prompt) + len(first) - 1


async def test_a_group_computes_its_prompt_once():
    prompt = list(range(1, 61))
    async with make_engine() as engine:
        group = await asyncio.gather(
            *(complete(engine, prompt, session=f"g{i}", seed=i) for i in range(4))
        )
    cached = sorted(pieces[0].num_cached_tokens for pieces in group)
    assert cached == [0, 59, 59, 59]
    assert len({tuple(ids_of(pieces)) for pieces in group}) > 1


async def test_a_stop_id_ends_the_completion_and_belongs_to_it():
    async with make_engine() as engine:
        free = ids_of(await complete(engine, [1, 2, 3]))
        stopped = await complete(engine, [1, 2, 3], session="t", stop_ids=(free[4],))
    assert ids_of(stopped) == free[: free.index(free[4]) + 1]
    assert stopped[-1].finish_reason == "stop"


async def test_weights_change_in_flight_and_every_token_names_its_version(tmp_path):
    path = tmp_path / "new.safetensors"
    save_weights(build_model(NANO, seed=1), str(path))
    source = WeightSource(path=str(path), sha256=file_sha256(path))
    async with make_engine() as engine:
        pieces = []
        stream = engine.stream(
            [1, 2, 3], Sampling(max_new_tokens=60, stream_interval_tokens=4, seed=3), session_id="s"
        )
        async for piece in stream:
            pieces.append(piece)
            if len(pieces) == 2:
                await engine.update_weights(source, policy_version=7)
    versions = [piece.policy_version for piece in pieces]
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    assert len(ids_of(pieces)) == 60


async def test_what_old_weights_computed_never_serves_a_new_request(tmp_path):
    path = tmp_path / "new.safetensors"
    save_weights(build_model(NANO, seed=1), str(path))
    prompt = list(range(1, 41))
    async with make_engine() as engine:
        await complete(engine, prompt)
        await engine.update_weights(
            WeightSource(path=str(path), sha256=file_sha256(path)), policy_version=1
        )
        pieces = await complete(engine, prompt)
    assert pieces[0].num_cached_tokens == 0
    expected = trainer_logprobs(build_model(NANO, seed=1), prompt + ids_of(pieces))
    torch.testing.assert_close(
        torch.tensor(logprobs_of(pieces)), expected[len(prompt) - 1 :].detach(), rtol=0, atol=1e-5
    )


async def test_drafts_come_with_the_weights_and_change_nothing(tmp_path):
    drafter = NANO.model_copy(update={"num_nextn_predict_layers": 1})
    path = tmp_path / "new.safetensors"
    save_weights(build_model(drafter, seed=1), str(path))
    completions = []
    async with make_engine(drafter) as engine, make_engine() as plain:
        completions += [await complete(e, [1, 2, 3]) for e in (engine, plain)]
        await engine.update_weights(
            WeightSource(path=str(path), sha256=file_sha256(path)), policy_version=1
        )
        completions.append(await complete(engine, [1, 2, 3]))
    async with make_engine(seed=1) as plain:
        completions.append(await complete(plain, [1, 2, 3]))
    before, plain_before, after, plain_after = map(ids_of, completions)
    assert (before, after) == (plain_before, plain_after)
    assert before != after


async def test_weights_that_are_not_what_was_announced_are_refused_and_the_old_ones_stay(tmp_path):
    path = tmp_path / "new.safetensors"
    save_weights(build_model(NANO, seed=1), str(path))
    async with make_engine() as engine:
        before = await complete(engine, [1, 2, 3])
        with pytest.raises(EngineError, match="digest"):
            await engine.update_weights(
                WeightSource(path=str(path), sha256="0" * 64), policy_version=1
            )
        after = await complete(engine, [1, 2, 3])
    assert ids_of(before) == ids_of(after)
    assert after[-1].policy_version == 0


async def test_a_request_that_is_abandoned_frees_its_slot():
    async with make_engine(max_running=1) as engine:
        stream = engine.stream(
            [1, 2], Sampling(max_new_tokens=100, stream_interval_tokens=1), session_id="a"
        )
        await anext(stream)
        await stream.aclose()
        assert len(ids_of(await complete(engine, [3, 4]))) == 12


async def test_logits_that_are_not_finite_fault_the_request_and_not_the_engine():
    engine = make_engine()
    model = engine._weights.current.model
    healthy = model.model.embed_tokens.weight[63].clone()
    model.model.embed_tokens.weight[63] = float("nan")
    async with engine:
        with pytest.raises(EngineError, match="not finite"):
            await complete(engine, [63, 1, 2])
        model.model.embed_tokens.weight[63] = healthy
        assert len(ids_of(await complete(engine, [1, 2]))) == 12


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ([1] * 150, {}, "max_context_tokens=160"),
        ([64], {}, "tokenizer does not match"),
    ],
)
async def test_impossible_requests_are_refused_with_the_reason(prompt, sampling, message):
    async with make_engine() as engine:
        with pytest.raises(EngineError, match=message):
            await complete(engine, prompt, **sampling)


async def test_a_full_queue_pushes_back():
    async with make_engine(max_running=1, max_waiting=1) as engine:
        results = await asyncio.gather(
            *(complete(engine, [i], session=str(i)) for i in range(1, 5)), return_exceptions=True
        )
    assert any(isinstance(r, EngineError) and "max_waiting=1" in str(r) for r in results)
    assert any(not isinstance(r, Exception) for r in results)


async def test_closing_ends_what_runs_with_an_error():
    engine = make_engine()
    async with engine:
        stream = engine.stream(
            [1, 2], Sampling(max_new_tokens=100, stream_interval_tokens=1), session_id="a"
        )
        await anext(stream)
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass


async def test_closing_gives_the_memory_of_the_cache_back_at_once():
    engine = make_engine()
    gc.disable()  # it is not to be waited for
    try:
        async with engine:
            cache = weakref.ref(engine._weights.current.cache)
            async for _ in engine.stream([1, 2, 3], Sampling(max_new_tokens=4), session_id="s"):
                pass
        assert cache() is None
        await engine.close()
    finally:
        gc.enable()


async def test_scoring_gives_the_logprob_of_each_token():
    ids = [5, 9, 2, 33, 8]
    async with make_engine() as engine:
        scores = await engine.score(ids, temperature=0.5)
    expected = trainer_logprobs(build_model(NANO, seed=0), ids, temperature=0.5)
    assert scores == pytest.approx([0.0, *expected.tolist()], abs=1e-5)
