import numpy as np
import pytest
import torch

from longarc.engine.sampler import sample, sampling_logprobs, uniforms
from longarc.errors import ContractError
from longarc.records.sampling import Sampling

PLAIN = Sampling(max_new_tokens=1)


def draw(logits, sampling, num_draws):
    batch = logits.expand(num_draws, -1)
    sampled = sample(
        batch, [sampling] * num_draws, seeds=list(range(num_draws)), positions=[0] * num_draws
    )
    return sampled.tokens, sampled.logprobs


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
    clean = sample(logits[:1], [PLAIN], seeds=[4], positions=[2])
    both = sample(logits, [PLAIN] * 2, seeds=[4, 4], positions=[2, 2])
    assert both.is_finite.tolist() == [True, False]
    assert both.tokens[0] == clean.tokens[0]
    assert both.logprobs[0] == clean.logprobs[0]


def truncated(**fields):
    return Sampling(max_new_tokens=1, returns_kept_ids=True, **fields)


MIXED = (
    PLAIN,
    truncated(top_p=0.8),
    Sampling(max_new_tokens=1, temperature=0.6, returns_raw_logprobs=True),
    truncated(top_k=7, temperature=1.4),
    Sampling(max_new_tokens=1, temperature=0.0, returns_raw_logprobs=True),
    truncated(min_p=0.1, top_p=0.9, returns_raw_logprobs=True),
)


def test_a_row_does_not_depend_on_what_other_rows_ask_for():
    logits = 3 * torch.randn(60, 301, generator=torch.Generator().manual_seed(3))
    samplings, seeds = [MIXED[i % len(MIXED)] for i in range(60)], list(range(60))
    together = sample(logits, samplings, seeds=seeds, positions=seeds)
    for i in range(60):
        one = sample(logits[i : i + 1], samplings[i : i + 1], seeds=[i], positions=[i])
        assert one.tokens[0] == together.tokens[i]
        assert one.logprobs[0] == together.logprobs[i]
        assert one.kept_ids[0] == together.kept_ids[i]
        assert one.raw_logprobs[0] == together.raw_logprobs[i]


def test_draws_come_from_the_kept_tokens_in_their_proportions():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.2, 0.05]]))
    tokens, logprobs = draw(logits, truncated(min_p=0.3), 20_000)
    frequencies = torch.bincount(tokens, minlength=4) / 20_000
    kept = torch.tensor([0.5, 0.25, 0.2]) / 0.95
    torch.testing.assert_close(frequencies, torch.cat([kept, torch.zeros(1)]), rtol=0, atol=0.015)
    torch.testing.assert_close(logprobs, kept.log()[tokens])


def test_what_a_token_was_drawn_from_is_recorded_where_it_is_asked_for():
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.25, 0.2]])).expand(4, -1)
    samplings = [
        truncated(top_k=2),
        truncated(top_p=0.999),
        Sampling(max_new_tokens=1, top_k=2),
        truncated(),
    ]
    sampled = sample(logits, samplings, seeds=[0] * 4, positions=[0] * 4)
    assert sampled.kept_ids == ((1, 2), (), (), ())


def test_raw_logprobs_are_those_of_the_plain_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for fields in ({"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 1}):
        sampling = Sampling(max_new_tokens=1, returns_raw_logprobs=True, **fields)
        sampled = sample(logits, [sampling], seeds=[1], positions=[0])
        expected = logits[0].log_softmax(0)[sampled.tokens[0]]
        assert sampled.raw_logprobs[0].item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_new_tokens", 0, "at least 1"),
        ("temperature", -0.1, "0, or at least 1e-06 and finite"),
        ("temperature", float("inf"), "0, or at least 1e-06 and finite"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.2, "above 0 and at most 1"),
        ("top_k", -1, "at least 0"),
        ("min_p", 1.0, "at least 0 and below 1"),
        ("stop_strings", ("a", ""), "without an empty string"),
        ("stream_interval_tokens", -1, "at least 0"),
    ],
)
def test_a_distribution_that_is_none_is_refused_by_name(field, value, allowed):
    with pytest.raises(ContractError, match=f"{field}=.*{allowed}"):
        Sampling(**({"max_new_tokens": 1} | {field: value}))
