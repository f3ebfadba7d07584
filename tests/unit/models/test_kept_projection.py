"""Scoring among the tokens that were drawn from: values, gradients, and what is refused."""

import pytest
import torch

from longarc.errors import ContractError
from longarc.models import projection
from longarc.models.kept_projection import kept_token_logprobs, scored

TOKENS, VOCAB, WIDTH = 29, 50, 6


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    counts = torch.randint(1, 9, (TOKENS,), generator=generator).tolist()
    kept = [sorted(torch.randperm(VOCAB, generator=generator)[:n].tolist()) for n in counts]
    targets = torch.tensor([ids[len(ids) // 2] for ids in kept])
    return hidden, weight, targets, kept


def expected_of(hidden, weight, targets, kept, temperature):
    logits = hidden @ weight.T / temperature
    mask = torch.ones_like(logits, dtype=torch.bool)
    for row, ids in enumerate(kept):
        mask[row, ids or slice(None)] = False
    table = logits.masked_fill(mask, -torch.inf).log_softmax(1)
    entropy = -(table.exp() * table.masked_fill(mask, 0.0)).sum(1)
    return table.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("is_chunked", [False, True])
def test_values_entropy_and_gradients_are_those_of_a_masked_softmax(is_chunked, monkeypatch):
    if is_chunked:
        monkeypatch.setattr(projection, "LOGIT_FLOATS", 1)
    hidden, weight, targets, kept = inputs()
    kept[3] = kept[17] = []  # drawn from the whole vocabulary
    found, entropy = scored(hidden, weight, targets, kept, temperature=0.7, with_entropy=True)
    expected, expected_entropy = expected_of(hidden, weight, targets, kept, 0.7)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    assert not entropy.requires_grad
    grad = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, want in zip(
        torch.autograd.grad(found, [hidden, weight], grad),
        torch.autograd.grad(expected, [hidden, weight], grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_a_token_scores_alike_in_any_company():
    hidden, weight, targets, kept = inputs(torch.float32)
    together, _ = kept_token_logprobs(hidden, weight, targets, kept)
    for i in range(TOKENS):
        one = slice(i, i + 1)
        alone, entropy = kept_token_logprobs(hidden[one], weight, targets[one], kept[one])
        assert entropy is None
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([[1, 4], [2, 3]], "target 4 of token 1 is not among the 2 ids"),
        ([[1, 4], []], "token 1 was drawn from no id"),
        ([[1, 4], [4, 99]], "99"),
    ],
)
def test_ids_that_cannot_be_right_are_refused(kept, message):
    hidden, weight, *_ = inputs()
    with pytest.raises(ContractError, match=message):
        kept_token_logprobs(hidden[:2], weight, torch.tensor([4, 4]), kept)
