"""The engine's cache from outside: what turns cost, what preemption leaves, what the engine says of its pages."""

import asyncio

import pytest
import torch

from longarc.config.engine import EngineConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.errors import ConfigError, EngineError
from longarc.models.build import build_model
from longarc.models.kernels.native import native
from longarc.records.sampling import Sampling
from model_cases import sharpened, small_glm, small_llama

CONFIGS = {"glm": small_glm(), "llama": small_llama()}


@pytest.fixture(params=CONFIGS)
def model(request):
    config = CONFIGS[request.param].model_copy(update={"max_position_embeddings": 2048})
    return sharpened(build_model(config, seed=3))


def open_engine(model, *, context=96, **settings):
    return EmbeddedEngine(model, EngineConfig(**settings), max_context_tokens=context)


async def complete(engine, prompt, *, session="s", **sampling):
    """Return ids, log-probabilities and pieces of one completion."""
    asked = Sampling(**{"max_new_tokens": 40, "seed": 5, **sampling})
    pieces = [piece async for piece in engine.stream(prompt, asked, session_id=session)]
    ids = [token for piece in pieces for token in piece.token_ids]
    return ids, [value for piece in pieces for value in piece.logprobs], pieces


async def test_twenty_turns_pay_for_new_tokens_only(model):
    history, num_new = [], 0
    async with open_engine(model, context=1400, max_running=4) as engine:
        for turn in range(20):
            observed = [(turn + 3 * i) % 60 for i in range(40)]
            history += observed
            num_new += len(observed)
            # Other sessions come in between.
            await complete(engine, [61, turn, 7], session=f"other {turn}", max_new_tokens=3)
            before = await engine.health()
            answer, _, pieces = await complete(engine, history, max_new_tokens=20)
            after = await engine.health()
            computed = len(history) - pieces[0].num_cached_tokens
            assert after.num_prompt_tokens - before.num_prompt_tokens == len(history)
            assert computed <= len(observed) + 1  # the last token of the turn before is new too
            history += answer
        total = after.num_prompt_tokens - after.num_cached_tokens - 20 * 3
    assert total <= 1.1 * num_new
    assert after.prefill_tokens_saved_frac > 0.9


@pytest.mark.skipif(native() is None, reason="eager attention rounds by the shape of the batch")
async def test_preemption_changes_no_token_no_logprob_and_loses_nothing(model):
    prompts = [[i, *range(20 + i)] for i in range(4)]
    async with open_engine(model) as engine:
        expected = [await complete(engine, p, session=f"{i}") for i, p in enumerate(prompts)]
        assert (await engine.health()).num_preemptions == 0
    async with open_engine(model, cache_tokens=160, page_tokens=16, max_running=4) as engine:
        found = await asyncio.gather(
            *(
                complete(engine, p, session=f"{i}", stream_interval_tokens=3)
                for i, p in enumerate(prompts)
            )
        )
        health = await engine.health()
    assert health.num_preemptions > 0
    assert [(ids, logprobs) for ids, logprobs, _ in found] == [
        (ids, logprobs) for ids, logprobs, _ in expected
    ]
    # A prompt is counted once, however often it is computed.
    assert health.num_prompt_tokens == sum(map(len, prompts))


async def test_members_of_a_group_share_the_pages_of_their_prompt(model):
    prompt = [i % 60 for i in range(70)]
    async with open_engine(model, context=112, page_tokens=16, max_running=4) as engine:
        pages = set()

        async def watched(index):
            asked = Sampling(max_new_tokens=8, seed=index, stream_interval_tokens=1)
            async for _ in engine.stream(prompt, asked, session_id=f"g{index}"):
                pages.add((await engine.health()).num_used_pages)

        await asyncio.gather(*(watched(i) for i in range(4)))
    # Four full pages for all, and a fifth for each.
    assert max(pages) == 4 + 4


async def test_a_listener_that_leaves_frees_its_pages_and_what_they_hold_is_kept(model):
    async with open_engine(model, max_running=2) as engine:
        asked = Sampling(max_new_tokens=90, stream_interval_tokens=1)
        stream = engine.stream([1, 2], asked, session_id="a")
        await anext(stream)
        assert (await engine.health()).num_used_pages > 0
        await stream.aclose()
        ids, _, _ = await complete(engine, [3, 4], max_new_tokens=5)
        assert len(ids) == 5
        health = await engine.health()
    assert health.num_used_pages == 0
    assert health.num_cached_pages == 2


async def test_a_prompt_at_fault_is_computed_again(model):
    """Rows behind logits that are not finite serve nobody, even where the next prompt is the same."""
    weight = model.model.embed_tokens.weight
    healthy = weight[63].clone()
    with torch.no_grad():
        weight[63] = float("nan")
    async with open_engine(model) as engine:
        with pytest.raises(EngineError, match="not finite"):
            await complete(engine, [63, *range(30)])
        with torch.no_grad():
            weight[63] = healthy
        ids, _, pieces = await complete(engine, [63, *range(30)])
    assert pieces[0].num_cached_tokens == 0
    assert len(ids) == 40


def test_a_cache_too_small_for_one_sequence_is_refused(model):
    with pytest.raises(ConfigError, match=r"max_context_tokens=300 does not fit .*=256; raise"):
        open_engine(model, context=300, cache_tokens=256, max_running=2)
