"""Top-k, top-p and min-p, beside their definitions written out."""

import math

import pytest
import torch

from longarc.algos.truncation import kept_logprobs, kept_tokens


def by_definition(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """Return the kept ids of one row: token by token, in fp64."""
    probability = logits.double().softmax(0).tolist()
    order = sorted(range(len(probability)), key=lambda i: (-probability[i], i))
    kept = order[: top_k or None]
    kept += [i for i in order if logits[i] == logits[kept[-1]] and i not in kept]
    if top_p < 1:
        share, total, needed = 0.0, sum(probability[i] for i in kept), []
        for i in kept:
            if share >= top_p * total:
                break
            needed.append(i)
            share += probability[i]
        kept = [i for i in kept if probability[i] >= probability[needed[-1]]]
    return {i for i in kept if probability[i] >= min_p * probability[order[0]]}


@pytest.mark.parametrize(
    "rule",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.97, "min_p": 0.02},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.1},
        {"top_k": 1000},
        {},
    ],
)
def test_kept_tokens_are_those_of_the_definition(rule):
    logits = 2 * torch.randn(20, 97, generator=torch.Generator().manual_seed(5))
    found = kept_tokens(logits, **rule)
    for row, kept in zip(logits, found, strict=True):
        assert set(kept.nonzero()[:, 0].tolist()) == by_definition(row, **rule)


def test_a_flat_distribution_over_many_tokens_is_searched_whole():
    logits = torch.arange(5000, 0, -1)[None] * 1e-4
    expected = by_definition(logits[0], top_p=0.6)
    assert len(expected) > 2500
    assert set(kept_tokens(logits, top_p=0.6)[0].nonzero()[:, 0].tolist()) == expected


def test_tokens_tied_with_the_last_one_are_kept_too():
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.2]]))
    assert kept_tokens(logits, top_k=2)[0].tolist() == [True] * 4
    assert kept_tokens(logits, top_p=0.5)[0].tolist() == [True] * 4
    assert kept_tokens(logits, top_p=0.4)[0].tolist() == [True, False, False, False]


def test_the_likeliest_token_always_stays():
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    for rule in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999999}):
        assert kept_tokens(logits, **rule)[0].tolist() == [False, True, False]


def test_logprobs_are_a_softmax_over_the_kept_and_gradients_are_too():
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    is_kept = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [1] * 6]).bool()
    found = kept_logprobs(logits, is_kept)
    expected = logits.double().masked_fill(~is_kept, -math.inf).log_softmax(1)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(18.0).view(3, 6).double().masked_fill(~is_kept, 0.0)
    pairs = [found.masked_fill(~is_kept, 0.0), expected.masked_fill(~is_kept, 0.0)]
    grads = [torch.autograd.grad((p * weights).sum(), logits, retain_graph=True)[0] for p in pairs]
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0].isfinite().all()


def test_columns_that_are_not_kept_change_no_bit():
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(200, 37, generator=generator)
    alone = kept_logprobs(logits, torch.ones_like(logits, dtype=torch.bool))
    wide = 9 * torch.randn(200, 400, generator=generator)
    columns = torch.randperm(400, generator=generator)[:37].sort().values
    wide[:, columns] = logits
    is_kept = torch.zeros(200, 400, dtype=torch.bool)
    is_kept[:, columns] = True
    assert torch.equal(kept_logprobs(wide, is_kept)[:, columns], alone)


def test_a_share_that_takes_every_token_of_a_small_vocabulary_keeps_it():
    assert kept_tokens(torch.zeros(1, 3), top_p=0.9).all()
    many = torch.zeros(1, 2000)
    assert kept_tokens(many, top_p=0.9999).all()
