"""Which tokens and sequences importance sampling lets through."""

import math

import pytest
import torch

from longarc.algos import losses
from longarc.algos.corrected_loss import decoupled_ppo_loss, weighted_clip_loss
from longarc.algos.importance import keeps_sequence, masked_weights
from longarc.algos.policy_loss import ppo_clip_loss
from longarc.algos.protocols import LossInputs

IDS = torch.tensor([0, 0, 0, 1, 1])
MASK = torch.tensor([True, True, False, True, True])


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


RATIOS = double(1.1, 0.9, 1e9, 3.0, 0.35)


@pytest.mark.parametrize(
    ("level", "band", "kept"),
    [
        ("token", (0.5, 2.0), [1, 1, 0, 0, 0]),
        ("sequence", (0.98, 1.06), [1, 1, 0, 1, 1]),  # products 0.99 and 1.05
        ("sequence", (0.995, 1.06), [0, 0, 0, 1, 1]),
        ("geometric", (0.99, 1.01), [1, 1, 0, 0, 0]),  # 0.995 and 1.025
        ("geometric", (0.99, 1.03), [1, 1, 0, 1, 1]),
    ],
)
def test_a_mask_looks_at_tokens_products_or_geometric_means(level, band, kept):
    weights = masked_weights(RATIOS.log(), MASK, IDS, low=band[0], high=band[1], level=level)
    torch.testing.assert_close(weights, RATIOS * double(*kept), rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_one_token_below_the_veto_drops_its_sequence_and_a_masked_one_does_not(level):
    low, high = 0.0, 1e9
    weights = masked_weights(RATIOS.log(), MASK, IDS, low=low, high=high, level=level, veto=0.36)
    torch.testing.assert_close(weights, RATIOS * double(1, 1, 0, 0, 0), rtol=0, atol=1e-12)
    masked = RATIOS.clone()
    masked[2] = 1e-9
    again = masked_weights(masked.log(), MASK, IDS, low=low, high=high, level=level, veto=0.36)
    assert torch.equal(again, weights)


def test_a_product_leaves_its_band_with_the_length_and_a_geometric_mean_does_not():
    for length in (2, 200):
        log_ratio = torch.full((length,), math.log(1.02), dtype=torch.float64)
        mask, ids = torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.long)
        band = {"low": 0.5, "high": 2.0}
        product = masked_weights(log_ratio, mask, ids, level="sequence", **band)
        mean = masked_weights(log_ratio, mask, ids, level="geometric", **band)
        assert bool(product.any()) is (length == 2)
        assert mean.all()


def test_no_token_is_no_sequence():
    none = torch.zeros(0, dtype=torch.float64)
    ids, mask = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
    for level in ("token", "sequence", "geometric"):
        assert len(masked_weights(none, mask, ids, low=0.5, high=2.0, level=level)) == 0


def test_only_sequences_that_went_wrong_and_are_far_away_are_masked():
    log_ratio = -double(0.3, 0.1, 99.0, 0.3, 0.1)  # mean divergence 0.2 in both
    wrong, right = double(*[-1.0] * 5), double(*[1.0] * 5)
    assert not keeps_sequence(log_ratio, wrong, MASK, IDS, delta=0.19).any()
    assert keeps_sequence(log_ratio, wrong, MASK, IDS, delta=0.21).all()
    assert keeps_sequence(log_ratio, right, MASK, IDS, delta=0.0).all()
    mixed = double(-1.0, 1.0, 1.0, 1.0, 1.0)
    assert keeps_sequence(log_ratio, mixed, MASK, IDS, delta=0.0).tolist() == [False] + [True] * 4
    # Likelier than it was is not far away: the divergence has a sign.
    assert keeps_sequence(-log_ratio, wrong, MASK, IDS, delta=0.0).all()


def inputs(policy, behaviour, advantages):
    return LossInputs(
        policy_logprobs=policy,
        proximal_logprobs=policy.detach(),
        behaviour_logprobs=behaviour,
        advantages=advantages,
        train_mask=torch.ones(len(policy), dtype=torch.bool),
        token_weights=torch.ones(len(policy), dtype=torch.float64),
        sequence_ids=torch.tensor([0, 0, 1]),
    )


def gradient(loss, ratios, advantages, **settings):
    policy = double(-1.0, -2.0, -0.5).requires_grad_()
    x = inputs(policy, policy.detach() - double(*ratios).log(), double(*advantages))
    out = loss(x, **settings)
    (grad,) = torch.autograd.grad(out.loss_sum, policy)
    return grad, out


@pytest.mark.parametrize(
    ("loss", "settings", "ratios", "weights", "num_rejected"),
    [
        (losses.truncated, {"cap": 2.0}, (0.5, 3.0, 1.0), (0.5, 2.0, 1.0), 1),
        (losses.masked, {}, (0.5, 3.0, 1.0), (0.5, 0.0, 1.0), 1),
        (losses.masked_by_sequence, {}, (0.5, 3.0, 2.5), (0.5, 3.0, 0.0), 1),
        (
            losses.masked_by_geometric_mean,
            {"low": 0.9, "high": 1.3},
            (0.5, 3.0, 1.0),
            (0.5, 3.0, 1.0),
            0,
        ),
        (losses.masked_by_geometric_mean, {}, (0.5, 3.0, 1.0), (0.0, 0.0, 1.0), 2),
        (losses.masked, {"low": 0.0, "high": 1e9}, (1e-5, 3.0, 1.0), (0.0, 0.0, 1.0), 2),
        (losses.cispo, {}, (0.5, 4.0, 1.0), (0.5, 3.0, 1.0), 1),
        (losses.behaviour_ppo, {}, (0.5, 3.0, 1.0), (0.5, 0.0, 1.0), 1),
    ],
)
def test_the_losses_of_a_recipe_correct_against_the_policy_that_sampled(
    loss, settings, ratios, weights, num_rejected
):
    grad, out = gradient(loss, ratios, (1.0, 1.0, 1.0), **settings)
    torch.testing.assert_close(grad, -double(*weights), rtol=0, atol=1e-12)
    assert out.num_rejected.item() == num_rejected
    assert out.normaliser.item() == 3.0


def test_gspo_spreads_the_ratio_of_a_segment_over_its_tokens_and_clips_it_whole():
    near = (math.exp(2e-4), math.exp(-4e-4), 1.0)  # means of the logs: -1e-4 and 0
    grad, out = gradient(losses.gspo, near, (2.0, 2.0, -1.0))
    s = math.exp(-1e-4)
    torch.testing.assert_close(grad, -double(2 * s, 2 * s, -1.0), rtol=0, atol=1e-12)
    assert out.num_rejected.item() == 0
    grad, out = gradient(losses.gspo, (1.1, 1.1, 1.0), (2.0, 2.0, -1.0))
    assert grad.tolist() == [0.0, 0.0, 1.0]
    assert out.num_rejected.item() == 2
    assert out.loss_sum.item() == pytest.approx(-(2 * 2.0 * 1.0004) + 1.0)


def test_opsm_drops_a_bad_segment_that_has_become_unlikely_and_keeps_a_good_one():
    ratios = (0.9, 0.9, 0.9)
    grad, out = gradient(losses.opsm, ratios, (-1.0, -1.0, 1.0))
    torch.testing.assert_close(grad, double(0.0, 0.0, -0.9), rtol=0, atol=1e-12)
    assert out.num_rejected.item() == 2
    grad, _ = gradient(losses.opsm, ratios, (-1.0, -1.0, 1.0), delta=1.0)
    torch.testing.assert_close(grad, double(0.9, 0.9, -0.9), rtol=0, atol=1e-12)


def test_decoupled_ppo_is_ppo_where_the_trust_region_is_around_the_policy_that_sampled():
    policy, behaviour = double(-1.0, -2.0, -0.5).requires_grad_(), double(-1.5, -1.0, -0.5)
    advantages, mask = double(1.0, -1.0, 2.0), torch.ones(3, dtype=torch.bool)
    clip = {"eps_low": 0.2, "eps_high": 0.28}
    one = decoupled_ppo_loss(policy, behaviour, behaviour, advantages, mask, **clip)
    other = ppo_clip_loss(policy, behaviour, advantages, mask, **clip)
    assert torch.equal(one.loss_sum, other.loss_sum)


def test_weights_of_zero_reject_and_a_dual_clip_saturates():
    policy = double(-1.0, -1.0, -1.0).requires_grad_()
    proximal = policy.detach() - double(1.0, 5.0, 5.0).log()
    out = weighted_clip_loss(
        policy,
        proximal,
        double(1.0, 0.0, 0.5),
        double(1.0, -1.0, -1.0),
        torch.ones(3, dtype=torch.bool),
        eps_low=0.2,
        eps_high=0.28,
        dual_clip=3.0,
    )
    assert out.loss_sum.item() == pytest.approx(-1.0 + 0.5 * 3.0)
    assert out.num_rejected.item() == 1
    (grad,) = torch.autograd.grad(out.loss_sum, policy)
    assert grad.tolist() == [-1.0, 0.0, 0.0]
