"""Hybrids behind the engine: what is sampled is what a trainer computes, whoever shares a prompt or a slot."""

import asyncio

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.config.engine import EngineConfig
from longarc.config.model import AttentionPattern, GlmMoeDsaConfig, LlamaConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.conversion import hybrid_config
from longarc.models.hf_weights import save_weights
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

PATTERN = AttentionPattern(layers="FSGD", window=16, chunk_tokens=16)
SHAPE = {"vocab_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 256}
CONFIGS = [
    hybrid_config(base(**SHAPE, hidden_size=48, initializer_range=0.2), PATTERN)
    for base in (GlmMoeDsaConfig, LlamaConfig)
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
async def test_turns_groups_and_reused_slots_sample_what_the_trainer_computes(config):
    model = build_model(config, seed=0)
    settings = EngineConfig(max_running=3, max_prefill_tokens=32)
    sampled = []

    async def complete(prompt, session, seed):
        sampling = Sampling(max_new_tokens=12, seed=seed, temperature=0.7)
        pieces = [p async for p in engine.stream(prompt, sampling, session_id=session)]
        ids = [i for piece in pieces for i in piece.token_ids]
        sampled.append((prompt, ids, [v for piece in pieces for v in piece.logprobs]))
        return ids, pieces[0].num_cached_tokens

    shared = list(range(1, 41))
    async with EmbeddedEngine(model, settings, max_context_tokens=160) as engine:
        await asyncio.gather(*(complete(shared, f"g{i}", i) for i in range(5)))
        first, _ = await complete([7, 8, 9], "chat", 1)
        history = [7, 8, 9, *first[:-1]]
        _, num_cached = await complete([*history, first[-1], 5, 6], "chat", 2)
        assert num_cached == len(history)  # the memories stand where the session's last turn ended
        _, num_cached = await complete([*history[:-3], 1, 2], "chat", 3)
        assert num_cached == 0  # they cannot go back

    for prompt, ids, logprobs in sampled:
        whole = torch.tensor([*prompt, *ids])
        hidden = model(whole, Layout.documents([len(whole)])).hidden
        expected, _ = token_logprobs(hidden[:-1], model.output_weight, whole[1:], temperature=0.7)
        expected = expected[len(prompt) - 1 :].detach()
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=5e-5)


async def test_a_memory_of_old_weights_is_continued_by_nobody(tmp_path):
    path = tmp_path / "new.safetensors"
    save_weights(build_model(CONFIGS[1], seed=1), str(path))
    settings = EngineConfig(max_running=2, max_prefill_tokens=32)
    model = build_model(CONFIGS[1], seed=0)
    async with LockStepEngine(model, settings, max_context_tokens=160) as engine:
        sampling = Sampling(max_new_tokens=30, stream_interval_tokens=2, seed=1)
        history = [1, 2, 3]
        async for piece in engine.stream([1, 2, 3], sampling, session_id="chat"):
            if len(history) == 3:
                source = WeightSource(path=str(path), sha256=file_sha256(path))
                await engine.update_weights(source, policy_version=1)
            history += piece.token_ids
        pieces = [p async for p in engine.stream([*history, 4], sampling, session_id="chat")]
        health = await engine.health()
    assert pieces[0].num_cached_tokens == 0
    assert health.num_used_pages == 0
