"""MTP losses from hidden states: those of the full table of probabilities, which never exists."""

import pytest
import torch

from longarc.algos.mtp import (
    acceptance,
    chained,
    end_to_end_tv,
    expected_accepted,
    single_step_tv,
)
from longarc.errors import ContractError
from longarc.models import projection
from longarc.models.mtp_losses import draft_scores
from model_cases import LargestTensor

DEPTHS, TARGETS, WIDTH, VOCAB = 3, 17, 6, 11


def inputs(*, targets=TARGETS, vocab=VOCAB, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(DEPTHS, targets, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    main = torch.randn(targets, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    target_ids = torch.randint(0, vocab, (targets,), generator=generator)
    return draft, main, weight, target_ids


def scores_of_the_table(draft, main, weight, target_ids):
    """From all probabilities at once."""
    logits = draft @ weight.T
    probs = (main @ weight.detach().T).softmax(dim=-1).expand(len(draft), -1, -1)
    logprobs = logits.log_softmax(dim=-1)[:, torch.arange(len(target_ids)), target_ids]
    return logprobs, acceptance(probs, logits)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 512])
@pytest.mark.parametrize("used", ["both", "logprobs", "acceptance"])
def test_scores_and_their_gradients_are_those_of_the_table(chunk_tokens, used):
    draft, main, weight, target_ids = inputs()
    got = draft_scores(draft, main, weight, target_ids, chunk_tokens=chunk_tokens)
    expected = scores_of_the_table(draft, main, weight, target_ids)
    grads = [torch.randn_like(score) for score in expected]
    kept = {"both": slice(2), "logprobs": slice(1), "acceptance": slice(1, 2)}[used]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(
        torch.autograd.grad(got[kept], [draft, weight], grads[kept]),
        torch.autograd.grad(expected[kept], [draft, weight], grads[kept]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("loss", [single_step_tv, end_to_end_tv], ids=["single", "end_to_end"])
def test_the_gradient_of_both_tv_losses_is_that_of_their_value(loss):
    draft, main, weight, target_ids = inputs(targets=7)
    is_valid = torch.ones(DEPTHS, 7, dtype=torch.bool)

    def total(draft):
        _, alpha = draft_scores(draft, main, weight.detach(), target_ids, chunk_tokens=3)
        return loss(chained(alpha, fill=0.0), chained(is_valid, fill=False)).sum()

    assert torch.autograd.gradcheck(total, draft)


def test_the_main_model_gets_no_gradient():
    draft, main, weight, target_ids = inputs()
    main.requires_grad_()
    draft_scores(draft, main, weight, target_ids)[1].sum().backward()
    assert main.grad is None


def test_no_target_is_nothing_to_score():
    draft, main, weight, target_ids = inputs(targets=0)
    logprobs, alpha = draft_scores(draft, main, weight, target_ids)
    assert logprobs.shape == alpha.shape == (DEPTHS, 0)


def test_a_target_outside_the_vocabulary_is_refused():
    draft, main, weight, target_ids = inputs()
    with pytest.raises(ContractError, match="token id 11 is outside"):
        draft_scores(draft, main, weight, target_ids + VOCAB - target_ids.max())


def test_a_chain_takes_each_step_one_target_further():
    steps = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]])
    assert chained(steps, fill=-1).tolist() == [[0, 1, 2, 3], [11, 12, 13, -1], [22, 23, -1, -1]]
    assert chained(steps[:, :1], fill=-1).tolist() == [[0], [-1], [-1]]
    assert chained(steps > 0, fill=False)[0].tolist() == [False, True, True, True]


def test_a_step_behind_an_invalid_one_does_not_count():
    alpha = torch.full((3, 4), 0.5, dtype=torch.float64)
    is_valid = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 1]], dtype=torch.bool)
    assert expected_accepted(alpha, is_valid).tolist() == [0.875, 0.5, 0.75, 0.0]
    lost = [1 - 0.875 / 3, 1 - 0.5 / 3, 0.75, 0.0]
    assert end_to_end_tv(alpha, is_valid).tolist() == pytest.approx(lost)
    assert single_step_tv(alpha, is_valid).sum().item() == 0.5 * 9


def test_invalid_steps_have_no_gradient_even_if_they_are_not_numbers():
    alpha = torch.tensor([[0.5], [float("nan")]], dtype=torch.float64, requires_grad=True)
    is_valid = torch.tensor([[True], [False]])
    (end_to_end_tv(alpha, is_valid).sum() + single_step_tv(alpha, is_valid).sum()).backward()
    assert alpha.grad.tolist() == [[-1.5], [0.0]]


def test_probabilities_of_all_targets_never_exist_at_once():
    draft, main, weight, target_ids = inputs(targets=900, vocab=300, dtype=torch.float32)
    with LargestTensor() as largest:
        logprobs, alpha = draft_scores(draft, main, weight, target_ids, chunk_tokens=32)
        (alpha.sum() + logprobs.sum()).backward()
    assert largest.numel <= 64 * 300 < 900 * 300 // 10


def test_chunks_shrink_with_the_vocabulary_where_nobody_chooses(monkeypatch):
    monkeypatch.setattr(projection, "LOGIT_FLOATS", 4 * 64 * 300)
    draft, main, weight, target_ids = inputs(targets=900, vocab=300, dtype=torch.float32)
    with LargestTensor() as largest:
        logprobs, alpha = draft_scores(draft, main, weight, target_ids)
        (alpha.sum() + logprobs.sum()).backward()
    assert largest.numel <= 64 * 300
