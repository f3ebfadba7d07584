"""Preferences, reward models and critics: values and gradients against their formulas, written once more."""

import math

import pytest
import torch

from longarc.algos.likelihood import positive_example_loss
from longarc.algos.preference import dpo_loss, dpo_sft_loss, implicit_rewards
from longarc.algos.reward_model import (
    bradley_terry_loss,
    judged_rewards,
    outcome_loss,
    ranking_loss,
    win_rates,
)
from longarc.algos.value_loss import (
    clipped_value_loss,
    explained_variance,
    value_cross_entropy_loss,
)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values):
    return double(*values).requires_grad_()


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def grads(out, *leaves):
    return [grad.tolist() for grad in torch.autograd.grad(out.loss_sum, leaves)]


CHOSEN, REJECTED = (-3.0, -2.0, -9.0), (-4.0, -1.0, -2.0)
REFERENCE = ((-3.5, -2.5, -8.0), (-3.0, -1.5, -2.5))
BETA = 0.15


def test_dpo_pulls_a_pair_apart_as_far_as_it_is_wrong():
    chosen, rejected = leaf(*CHOSEN), leaf(*REJECTED)
    out = dpo_loss(chosen, rejected, double(*REFERENCE[0]), double(*REFERENCE[1]), beta=BETA)
    margins = [(c - a) - (r - b) for c, r, a, b in zip(CHOSEN, REJECTED, *REFERENCE, strict=True)]
    assert margins == [1.5, 0.0, -1.5]
    expected = -math.fsum(log_sigmoid(BETA * m) for m in margins)
    assert out.loss_sum.item() == pytest.approx(expected, abs=1e-12)
    up, down = grads(out, chosen, rejected)
    assert up == pytest.approx([-BETA * sigmoid(-BETA * m) for m in margins], abs=1e-12)
    assert down == pytest.approx([-g for g in up], abs=1e-12)
    assert (out.normaliser.item(), out.num_rejected.item()) == (3.0, 1.0)


def test_dpo_with_sft_holds_the_better_answer_up():
    chosen, rejected = leaf(*CHOSEN), leaf(*REJECTED)
    references = [double(*row) for row in REFERENCE]
    out = dpo_sft_loss(chosen, rejected, *references, double(2.0, 4.0, 3.0))
    alone = dpo_loss(chosen, rejected, *references, beta=0.15)
    sft = 3.0 / 2 + 2.0 / 4 + 9.0 / 3
    assert out.loss_sum.item() == pytest.approx(alone.loss_sum.item() + 0.8 * sft, abs=1e-12)
    (up,) = torch.autograd.grad(out.loss_sum, chosen)
    (before,) = torch.autograd.grad(alone.loss_sum, chosen)
    torch.testing.assert_close(up, before - 0.8 / double(2.0, 4.0, 3.0), rtol=0, atol=1e-12)
    assert out.normaliser.item() == 3.0


def test_the_reward_that_a_policy_is_optimal_for():
    rewards = implicit_rewards(leaf(-1.0, -3.0), double(-2.0, -2.0), beta=0.5)
    assert rewards.tolist() == [0.5, -0.5]
    assert not rewards.requires_grad


def test_a_reward_model_learns_from_pairs():
    better, worse = leaf(1.0, -1.0), leaf(0.0, 2.0)
    out = bradley_terry_loss(better, worse, margin=0.5)
    leads = [0.5, -3.5]
    expected = -math.fsum(log_sigmoid(lead) for lead in leads)
    assert out.loss_sum.item() == pytest.approx(expected, abs=1e-12)
    up, _ = grads(out, better, worse)
    assert up == pytest.approx([-sigmoid(-lead) for lead in leads], abs=1e-12)
    assert (out.normaliser.item(), out.num_rejected.item()) == (2.0, 1.0)


def test_a_ranking_is_all_its_pairs_and_ties_are_none():
    scores = leaf(2.0, 0.0, 1.0, 1.0)
    out = ranking_loss(scores, torch.tensor([0, 2, 1, 1]))
    pairs = [(0, 1), (0, 2), (0, 3), (2, 1), (3, 1)]
    s = scores.tolist()
    expected = -math.fsum(log_sigmoid(s[i] - s[j]) for i, j in pairs)
    assert out.loss_sum.item() == pytest.approx(expected, abs=1e-12)
    assert (out.normaliser.item(), out.num_rejected.item()) == (5.0, 0.0)
    # Ranked by the order of the answers or any other: a permutation moves the gradient with it.
    order = torch.tensor([3, 1, 0, 2])
    shuffled = leaf(*[s[i] for i in order.tolist()])
    again = ranking_loss(shuffled, torch.tensor([0, 2, 1, 1])[order])
    (grad,) = torch.autograd.grad(out.loss_sum, scores)
    (moved,) = torch.autograd.grad(again.loss_sum, shuffled)
    torch.testing.assert_close(moved, grad[order], rtol=0, atol=1e-12)


def test_a_ranking_without_a_pair_is_nothing():
    out = ranking_loss(leaf(1.0, 2.0), torch.tensor([0, 0]))
    assert (out.loss_sum.item(), out.normaliser.item()) == (0.0, 0.0)


def test_an_outcome_model_learns_what_was_done():
    logits = leaf(2.0, -1.0, 0.5)
    out = outcome_loss(logits, double(1.0, 1.0, 0.0))
    expected = -(log_sigmoid(2.0) + log_sigmoid(-1.0) + log_sigmoid(-0.5))
    assert out.loss_sum.item() == pytest.approx(expected, abs=1e-12)
    (grad,) = grads(out, logits)
    assert grad == pytest.approx([sigmoid(2.0) - 1, sigmoid(-1.0) - 1, sigmoid(0.5)], abs=1e-12)
    assert (out.normaliser.item(), out.num_rejected.item()) == (3.0, 2.0)


def test_a_judge_rewards_with_its_likelier_word():
    assert judged_rewards(double(-0.1, -2.0, -1.0), double(-2.0, -0.1, -1.0)).tolist() == [1, 0, 0]


def test_answers_that_win_more_comparisons_are_rewarded_more():
    nan = math.nan
    preferences = double(
        [nan, 1.0, 0.5, nan], [0.0, nan, 0.25, nan], [0.5, 0.75, nan, nan], [nan] * 4
    )
    compared = ~preferences.isnan()
    assert win_rates(preferences, compared).tolist() == [0.75, 0.125, 0.625, 0.5]
    everybody = torch.ones(4, 4, dtype=torch.bool)
    known = preferences.nan_to_num(0.5)
    assert win_rates(known, everybody).sum().item() == pytest.approx(2.0)  # 4 times 1/2


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_critic_learns_from_trained_tokens_alone(poison, clip):
    mask = torch.tensor([True, False, True])
    columns = [double(0.5, poison, 0.9), double(0.4, poison, 0.5), double(1.0, poison, 0.0)]
    values = columns[0].requires_grad_()
    out = clipped_value_loss(
        values, *columns[1:], mask, clip=clip, token_weights=double(1.0, 9.0, 0.5)
    )
    # The second has moved by 0.4, away from its target: the unclipped error is the larger one.
    assert out.loss_sum.item() == pytest.approx(0.25 + 0.5 * 0.81, abs=1e-12)
    assert grads(out, values)[0] == pytest.approx([-1.0, 0.0, 0.9], abs=1e-12)
    assert (out.normaliser.item(), out.num_rejected.item()) == (1.5, 0.0)


def test_a_critic_of_outcomes_learns_probabilities():
    logits = leaf(1.0, math.nan, -2.0)
    mask = torch.tensor([True, False, True])
    out = value_cross_entropy_loss(logits, double(1.0, math.nan, 1.0), mask)
    assert out.loss_sum.item() == pytest.approx(-log_sigmoid(1.0) - log_sigmoid(-2.0), abs=1e-12)
    expected = [sigmoid(1.0) - 1, 0.0, sigmoid(-2.0) - 1]
    assert grads(out, logits)[0] == pytest.approx(expected, abs=1e-12)
    assert out.normaliser.item() == 2.0


def test_explained_variance_of_critics_that_know_all_the_mean_and_less():
    returns, mask = double(0.0, 1.0, 1.0, math.nan), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    constant = double(0.3, 0.3, 0.3, math.nan)
    assert explained_variance(constant, returns, mask) == pytest.approx(0.0)
    assert explained_variance(1 - returns, returns, mask) < 0
    assert math.isnan(explained_variance(returns, torch.ones(4).double(), mask))
    assert math.isnan(explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)))
    alike = double(0.7, 0.7 + 1e-16, 0.7 - 1e-16, math.nan)  # as sums along a rollout leave them
    assert math.isnan(explained_variance(returns, alike, mask))
    small = double(0.0, 1e-9, 2e-9, math.nan)
    assert explained_variance(small, small, mask) == 1.0


def test_positive_examples_are_learned_and_have_a_normaliser_of_their_own():
    policy = leaf(-1.0, -2.0, -0.5, math.nan)
    correct, mask = torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    out = positive_example_loss(policy, correct, mask)
    assert (out.loss_sum.item(), out.normaliser.item()) == (1.5, 2.0)
    assert grads(out, policy)[0] == [-1.0, 0.0, -1.0, 0.0]
