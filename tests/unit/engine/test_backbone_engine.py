"""transformers' layers behind the engine: what is sampled is what a trainer computes, before and after a push."""

import asyncio

import pytest
import torch

from longarc.config.engine import EngineConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling
from longarc.trainer.publish import WeightPublisher
from transformers_cases import FAMILIES, small, spread

pytest.importorskip("transformers")


def trainer_logprobs(model, prompt, ids):
    whole = torch.tensor([*prompt, *ids])
    with torch.no_grad():
        hidden = model(whole, Layout.documents([len(whole)])).hidden
        logprobs, _ = token_logprobs(hidden[:-1], model.output_weight, whole[1:], temperature=0.7)
    return logprobs[len(prompt) - 1 :]


@pytest.mark.parametrize("family", FAMILIES)
async def test_groups_turns_and_pushed_weights_sample_what_the_trainer_computes(family, tmp_path):
    config = small(family, initializer_range=0.2)
    model, trained = (spread(build_model(config, seed=seed)) for seed in (0, 1))
    untouched = spread(build_model(config, seed=0))
    settings = EngineConfig(max_running=3, max_prefill_tokens=32)
    sampled = []

    async def complete(prompt, session, seed):
        sampling = Sampling(max_new_tokens=12, seed=seed, temperature=0.7)
        pieces = [p async for p in engine.stream(prompt, sampling, session_id=session)]
        ids = [i for piece in pieces for i in piece.token_ids]
        version = pieces[-1].policy_version
        sampled.append((prompt, ids, [v for piece in pieces for v in piece.logprobs], version))
        return ids, pieces[0].num_cached_tokens

    shared = list(range(1, 41))
    async with EmbeddedEngine(model, settings, max_context_tokens=160) as engine:
        groups = await asyncio.gather(*(complete(shared, f"g{i}", i) for i in range(5)))
        assert max(num_cached for _, num_cached in groups) == len(shared) - 1
        first, _ = await complete([7, 8, 9], "chat", 1)
        history = [7, 8, 9, *first[:-1]]
        _, num_cached = await complete([*history, first[-1], 5, 6], "chat", 2)
        assert num_cached == len(history)
        _, num_cached = await complete([*history[:-3], 1, 2], "chat", 3)
        assert num_cached == len(history) - 3  # rows, and so any prefix of them serves
        source = WeightPublisher(str(tmp_path)).publish(trained, 1)
        await engine.update_weights(source, policy_version=1)
        await asyncio.gather(*(complete(shared, f"h{i}", i) for i in range(3)))

    assert [version for *_, version in sampled] == [0] * 8 + [1] * 3
    for prompt, ids, logprobs, version in sampled:
        expected = trainer_logprobs(trained if version else untouched, prompt, ids)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


def test_the_cache_holds_expanded_heads_of_latent_attention():
    model = build_model(small("glm4_moe_lite"), seed=0)
    assert model.cache_widths() == {"keys": 4 * (12 + 8), "values": 4 * 10}
    grouped = build_model(small("glm4_moe"), seed=0)
    assert grouped.cache_widths() == {"keys": 2 * 8, "values": 2 * 8}
