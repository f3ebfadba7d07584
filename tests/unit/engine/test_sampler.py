import numpy as np
import pytest
import torch

from longarc.engine.sampler import sample, sampling_logprobs, uniforms
from longarc.records.sampling import Sampling

PLAIN = Sampling(max_new_tokens=1)


def draw(logits, sampling, num_draws):
    batch = logits.expand(num_draws, -1)
    tokens, logprobs, _ = sample(
        batch, [sampling] * num_draws, seeds=list(range(num_draws)), positions=[0] * num_draws
    )
    return tokens, logprobs


def test_uniform_numbers_fill_the_interval_and_depend_on_seed_and_position():
    numbers = uniforms(list(range(20_000)), [0] * 20_000)
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(counts - 1000).max() < 150
    assert len(set(uniforms([1, 1, 2, 2], [0, 1, 0, 1]).tolist())) == 4


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    tokens, _ = draw(logits, PLAIN, 20_000)
    frequencies = torch.bincount(tokens, minlength=3) / 20_000
    torch.testing.assert_close(frequencies, torch.softmax(logits[0], 0), rtol=0, atol=0.015)


def test_logprobs_are_those_of_the_distribution_sampled_from():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert sampling_logprobs(logits, [PLAIN])[0, 0].item() == pytest.approx(-0.407606, abs=1e-6)
    half = Sampling(max_new_tokens=1, temperature=0.5)
    assert sampling_logprobs(logits, [half])[0, 0].item() == pytest.approx(-0.142932, abs=1e-6)


def test_top_k_and_top_p_renormalise():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    top_k = sampling_logprobs(logits, [Sampling(max_new_tokens=1, top_k=2)]).exp()[0]
    torch.testing.assert_close(top_k, torch.tensor([0.625, 0.375, 0.0, 0.0]))
    top_p = sampling_logprobs(logits, [Sampling(max_new_tokens=1, top_p=0.75)]).exp()[0]
    torch.testing.assert_close(top_p, torch.tensor([0.625, 0.375, 0.0, 0.0]))


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    tokens = sampling_logprobs(logits, [PLAIN]).exp()
    assert tokens[0, [0, 2, 4]].tolist() == [0, 0, 0]
    top = Sampling(max_new_tokens=1, top_k=1)
    drawn, _ = draw(torch.tensor([[0.0, 3.0, 1.0]]), top, 500)
    assert set(drawn.tolist()) == {1}


def test_temperature_zero_takes_the_first_maximum_with_certainty():
    greedy = Sampling(max_new_tokens=1, temperature=0.0)
    tokens, logprobs = draw(torch.tensor([[1.0, 4.0, 4.0]]), greedy, 3)
    assert tokens.tolist() == [1, 1, 1]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_rows_that_are_not_finite_are_reported_and_harm_no_other():
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0]])
    clean, clean_logprobs, _ = sample(logits[:1], [PLAIN], seeds=[4], positions=[2])
    tokens, logprobs, is_finite = sample(logits, [PLAIN] * 2, seeds=[4, 4], positions=[2, 2])
    assert is_finite.tolist() == [True, False]
    assert tokens[0] == clean[0]
    assert logprobs[0] == clean_logprobs[0]
