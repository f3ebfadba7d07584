"""The native sampler draws the tokens that the eager one draws."""

import pytest
import torch

from longarc.engine.sampler import sample
from longarc.models.kernels.native import native
from longarc.records.sampling import Sampling

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels are not built")

TEMPERATURES = (1.0, 0.7, 0.0, 1.3)


def draw(logits, *, first_seed=0):
    samplings = [
        Sampling(max_new_tokens=1, temperature=TEMPERATURES[i % 4]) for i in range(len(logits))
    ]
    seeds = [first_seed + i for i in range(len(logits))]
    sampled = sample(logits, samplings, seeds=seeds, positions=list(range(len(logits))))
    return sampled.tokens, sampled.logprobs, sampled.is_finite


@pytest.mark.parametrize("vocab", [7, 64, 2048, 2050])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_tokens_are_the_eager_ones(vocab, spread, monkeypatch):
    generator = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(400, vocab, generator=generator)
    before = logits.clone()
    tokens, logprobs, finite = draw(logits)
    assert torch.equal(logits, before)
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    eager_tokens, eager_logprobs, eager_finite = draw(logits)
    assert torch.equal(tokens, eager_tokens)
    assert torch.equal(finite, eager_finite)
    torch.testing.assert_close(logprobs, eager_logprobs, atol=1e-5, rtol=1e-5)


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((400, 100), -200.0)
    logits[:, 37] = 0.0
    logits[:, 61] = 0.0
    tokens, _, _ = draw(logits)
    assert set(tokens.tolist()) == {37, 61}


def test_rows_that_are_not_finite_are_reported():
    logits = torch.zeros(4, 33)
    logits[1, 5] = float("nan")
    logits[2, 32] = float("inf")
    _, _, finite = draw(logits)
    assert finite.tolist() == [True, False, False, True]


def test_zero_temperature_takes_the_first_of_equal_maxima():
    logits = torch.zeros(3, 20)
    logits[2, 4] = logits[2, 9] = 1.0
    tokens, logprobs, _ = draw(logits)
    assert tokens[2] == 4
    assert logprobs[2] == 0.0
