"""Rollouts as of an FP8 server: what is rounded, that updates are too, and what corrections make of the difference."""

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.algos.importance import truncated_weights
from longarc.algos.policy_loss import icepop_loss
from longarc.config.engine import EngineConfig
from longarc.models.build import build_model
from longarc.models.fp8 import round_to_fp8
from longarc.models.hf_weights import save_weights
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256
from model_cases import sharpened, small_glm, small_llama

CONFIGS = {"glm": small_glm(), "llama": small_llama()}
PROMPT = list(range(1, 21))


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def model_of(config, seed=3):
    return sharpened(build_model(config, seed=seed))


def rounded_of(config, seed=3):
    model = model_of(config, seed)
    round_to_fp8(model)
    return model


def open_engine(config, quantisation):
    settings = EngineConfig(max_running=4, weight_quantisation=quantisation)
    return LockStepEngine(model_of(config), settings, max_context_tokens=128)


async def complete(engine, *, seed=5):
    asked = Sampling(max_new_tokens=80, seed=seed)
    pieces = [piece async for piece in engine.stream(PROMPT, asked, session_id="s")]
    return (
        [token for piece in pieces for token in piece.token_ids],
        torch.tensor([value for piece in pieces for value in piece.logprobs]),
    )


def scored(model, ids):
    whole = torch.tensor(PROMPT + ids)
    hidden = model(whole, Layout.documents([len(whole)])).hidden
    return token_logprobs(hidden[:-1], model.output_weight, whole[1:])[0][
        len(PROMPT) - 1 :
    ].detach()


def test_matrices_of_layers_are_rounded_and_nothing_else(config):
    model, rounded = model_of(config), rounded_of(config)
    changed = {
        name
        for (name, before), after in zip(
            model.named_parameters(), rounded.parameters(), strict=True
        )
        if not torch.equal(before, after)
    }
    kept = ("norm", "embed_tokens", "lm_head", "gate.weight", "weights_proj", "bias")
    expected = {
        name for name, _ in model.named_parameters() if not any(part in name for part in kept)
    }
    assert changed == expected
    assert all(
        torch.equal(before, after)
        for before, after in zip(model.buffers(), rounded.buffers(), strict=True)
    )


async def test_what_is_sampled_is_what_rounded_weights_compute_after_an_update_too(
    config, tmp_path
):
    path = tmp_path / "new.safetensors"
    save_weights(model_of(config, seed=4), path)
    source = WeightSource(path=str(path), sha256=file_sha256(path))
    async with open_engine(config, "fp8") as engine:
        first, first_logprobs = await complete(engine)
        await engine.update_weights(source, policy_version=1)
        second, second_logprobs = await complete(engine)
        scores = await engine.score(PROMPT + second)
    for ids, logprobs, seed in ((first, first_logprobs, 3), (second, second_logprobs, 4)):
        expected = scored(rounded_of(config, seed), ids)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(
        torch.tensor(scores[len(PROMPT) :]), second_logprobs, rtol=0, atol=5e-5
    )


@pytest.mark.parametrize(("quantisation", "differs"), [("none", False), ("fp8", True)])
async def test_the_trainers_weights_differ_and_the_corrections_take_out_what_differs_too_much(
    config, quantisation, differs
):
    async with open_engine(config, quantisation) as engine:
        drawn = [await complete(engine, seed=seed) for seed in range(6)]
    trainer = model_of(config)
    policy = torch.cat([scored(trainer, ids) for ids, _ in drawn])
    behaviour = torch.cat([logprobs for _, logprobs in drawn])
    log_ratio = policy - behaviour
    mean_gap, k3 = log_ratio.abs().mean(), (log_ratio.expm1() - log_ratio).mean()
    assert (mean_gap > 1e-2) == (k3 > 1e-4) == differs
    low, high = 0.9, 1.1
    ratio = log_ratio.exp()
    is_out = (ratio < low) | (ratio > high)
    loss = icepop_loss(
        policy.requires_grad_(),
        policy.detach(),
        behaviour,
        torch.ones(len(policy)),
        torch.ones(len(policy), dtype=torch.bool),
        low=low,
        high=high,
        eps_low=0.2,
        eps_high=0.28,
    )
    assert int(loss.num_rejected) == int(is_out.sum())
    assert (int(loss.num_rejected) > 0) == differs
    loss.loss_sum.backward()
    assert bool((policy.grad[is_out] == 0).all())
    truncated = truncated_weights(ratio, cap=high)
    assert (float((truncated < ratio).sum()) > 0) == differs
