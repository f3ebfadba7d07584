"""Distillation: one teacher or several, the sampled token or the vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longarc.algos.distill import distillation_advantages, guided_advantages, routed_logprobs
from longarc.algos.distill_vocabulary import full_vocabulary_loss, top_k_loss

VOCAB = 5
ROWS = st.lists(st.floats(-4, 4), min_size=VOCAB, max_size=VOCAB)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_grad(loss, logits, *args, **settings):
    leaf = logits.clone().requires_grad_()
    out = loss(leaf, *args, **settings)
    return out, torch.autograd.grad(out.loss_sum, leaf)[0]


def kl(p, q):
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


@given(ROWS, ROWS)
@settings(deadline=None)
def test_both_directions_are_the_divergences_they_are_called_after(policy, teacher):
    p, q = (double(row).softmax(0).tolist() for row in (policy, teacher))
    mask = torch.tensor([True])
    reverse, grad = value_and_grad(full_vocabulary_loss, double([policy]), double([teacher]), mask)
    assert reverse.loss_sum.item() == pytest.approx(kl(p, q), abs=1e-12)
    # d KL(p || q) / dz_j = p_j (log p_j / q_j - KL)
    expected = [a * (math.log(a / b) - kl(p, q)) for a, b in zip(p, q, strict=True)]
    torch.testing.assert_close(grad[0], double(expected), rtol=0, atol=1e-12)
    forward, grad = value_and_grad(
        full_vocabulary_loss, double([policy]), double([teacher]), mask, direction="forward"
    )
    assert forward.loss_sum.item() == pytest.approx(kl(q, p), abs=1e-12)
    torch.testing.assert_close(grad[0], double(p) - double(q), rtol=0, atol=1e-12)
    assert forward.normaliser.item() == 1.0


@given(ROWS, ROWS, st.sampled_from(["reverse", "forward"]))
@settings(deadline=None)
def test_a_few_tokens_and_a_bucket_are_a_lower_bound_which_grows_with_them(
    policy, teacher, direction
):
    logits, mask = double([policy]), torch.tensor([True])
    logprobs = double([teacher]).log_softmax(-1)
    whole, grad = value_and_grad(full_vocabulary_loss, logits, logprobs, mask, direction=direction)
    bounds = []
    for num_kept in range(1, VOCAB):
        listed, ids = logprobs.topk(num_kept)
        out, own = value_and_grad(top_k_loss, logits, listed, ids, mask, direction=direction)
        bounds.append(out.loss_sum.item())
    assert all(
        a <= b + 1e-9 for a, b in zip(bounds, [*bounds[1:], whole.loss_sum.item()], strict=True)
    )
    # With one token left over, the bucket is that token.
    assert bounds[-1] == pytest.approx(whole.loss_sum.item(), abs=1e-9)
    torch.testing.assert_close(own, grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_rows_that_are_not_trained_cannot_leak(poison, direction):
    generator = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, 3, VOCAB, generator=generator, dtype=torch.float64)
    mask = torch.tensor([True, False, True])
    kept, ids = teacher.log_softmax(-1).topk(2)
    weights = double([0.5, 7.0, 2.0])
    shared = {"direction": direction, "token_weights": weights}
    for loss, given_args in ((full_vocabulary_loss, (teacher,)), (top_k_loss, (kept, ids))):
        clean, grad = value_and_grad(loss, policy, *given_args, mask, **shared)
        rows = mask[:, None]
        first = given_args[0].masked_fill(~rows, poison)
        out, dirty = value_and_grad(
            loss, policy.masked_fill(~rows, poison), first, *given_args[1:], mask, **shared
        )
        assert torch.equal(out.loss_sum, clean.loss_sum)
        assert torch.equal(dirty, grad)
        assert not grad[1].any()
        assert out.normaliser.item() == 2.5
        parts = [
            value_and_grad(
                loss, policy[s], *(a[s] for a in given_args), mask[s],
                direction=direction, token_weights=weights[s],
            )[0]
            for s in (slice(0, 1), slice(1, 3))
        ]  # fmt: skip
        assert sum(p.loss_sum.item() for p in parts) == pytest.approx(clean.loss_sum.item())


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_words_that_nobody_says_cost_nothing_and_have_no_gradient(direction):
    policy = double([[0.0, 1.0, -math.inf]])
    teacher = double([[0.5, 0.0, -math.inf]])
    out, grad = value_and_grad(
        full_vocabulary_loss, policy, teacher, torch.tensor([True]), direction=direction
    )
    p, q = policy[0, :2].softmax(0).tolist(), teacher[0, :2].softmax(0).tolist()
    expected = kl(p, q) if direction == "reverse" else kl(q, p)
    assert out.loss_sum.item() == pytest.approx(expected)
    assert grad.isfinite().all()


def test_a_student_that_says_what_its_teacher_never_says_is_infinitely_far_away():
    policy, teacher = double([[0.0, 0.0]]), double([[0.0, -math.inf]])
    assert full_vocabulary_loss(policy, teacher, torch.tensor([True])).loss_sum.item() == math.inf


def test_a_teacher_whose_likeliest_tokens_are_all_of_it_leaves_a_bucket_of_rounding():
    listed = torch.tensor([[0.5, 0.5]]).log()
    out = top_k_loss(torch.zeros(1, 3), listed, torch.tensor([[0, 1]]), torch.tensor([True]))
    assert out.loss_sum.isfinite()


def test_a_teacher_beside_rewards():
    policy, teacher, rewards = double([-1.0, -2.0]), double([-0.5, -3.0]), double([1.0, -1.0])
    both = guided_advantages(rewards, policy, teacher, coeff=0.5)
    assert both.tolist() == [1.25, -1.5]
    alone = guided_advantages(torch.zeros(2).double(), policy, teacher, coeff=1.0)
    assert torch.equal(alone, distillation_advantages(policy, teacher))


def test_each_token_is_scored_by_the_teacher_of_its_task_and_the_others_are_not_read():
    nan = math.nan
    scores = double([[-1.0, nan, nan, -4.0], [nan, -2.0, -3.0, nan]])
    assert routed_logprobs(scores, torch.tensor([0, 1, 1, 0])).tolist() == [-1.0, -2.0, -3.0, -4.0]
