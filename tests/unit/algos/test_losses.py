"""Losses as a recipe names them, and the faults they must not have."""

import subprocess
import sys

import pytest
import torch

from longarc.algos import losses
from longarc.algos.advantages import group_advantages
from longarc.algos.importance import truncated_weights
from longarc.algos.policy_loss import double_sided_loss, icepop_loss, ppo_clip_loss
from longarc.algos.protocols import AdvantageFn, LossInputs, PolicyLoss
from longarc.algos.schedule import warmup_constant, warmup_cosine, warmup_linear


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def inputs(**changes):
    values = {
        "policy_logprobs": tensor(-1.0, -2.0, -0.5),
        "proximal_logprobs": tensor(-1.2, -1.6, -0.5),
        "behaviour_logprobs": tensor(-1.1, -1.0, -0.9),
        "advantages": tensor(1.0, -1.0, 0.5),
        "train_mask": torch.tensor([True, True, True]),
        "token_weights": tensor(1.0, 0.5, 2.0),
        "sequence_ids": torch.tensor([0, 0, 1]),
    }
    return LossInputs(**(values | changes))


def test_the_named_losses_are_the_published_formulas_with_their_published_defaults():
    x = inputs()
    named = [losses.icepop(x), losses.double_sided(x), losses.ppo_clip(x)]
    shared = {"token_weights": x.token_weights}
    policy, behaviour = x.policy_logprobs, x.behaviour_logprobs
    proximal, advantages, mask = x.proximal_logprobs, x.advantages, x.train_mask
    clip = {"eps_low": 0.2, "eps_high": 0.28}
    direct = [
        icepop_loss(
            policy, proximal, behaviour, advantages, mask, low=0.5, high=2.0, **clip, **shared
        ),
        double_sided_loss(policy, behaviour, advantages, mask, low=0.2, high=4.0, **shared),
        ppo_clip_loss(policy, proximal, advantages, mask, **clip, **shared),
    ]
    for one, other in zip(named, direct, strict=True):
        assert torch.equal(one.loss_sum, other.loss_sum)
        assert torch.equal(one.normaliser, other.normaliser)
        assert torch.equal(one.num_rejected, other.num_rejected)
        assert one.normaliser.item() == 3.5


def test_on_policy_icepop_and_double_sided_have_one_gradient():
    policy = tensor(-1.0, -2.0, -0.5).requires_grad_()
    x = inputs(policy_logprobs=policy, proximal_logprobs=policy.detach())
    (first,) = torch.autograd.grad(losses.icepop(x).loss_sum, policy)
    (second,) = torch.autograd.grad(losses.double_sided(x, low=0.5, high=2.0).loss_sum, policy)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_a_popped_token_is_selected_away_and_never_multiplied():
    policy = tensor(-1.0, -1.0).requires_grad_()
    out = icepop_loss(
        policy,
        policy.detach(),
        policy.detach() - tensor(1000.0, 0.0),
        tensor(1.0, 1.0),
        torch.tensor([True, True]),
        low=0.5,
        high=5.0,
        eps_low=0.2,
        eps_high=0.28,
    )
    mean = out.loss_sum / out.normaliser
    mean.backward()
    assert mean.item() == -0.5
    assert policy.grad.tolist() == [0.0, -0.5]
    assert out.num_rejected.item() == 1


def test_the_denominator_is_the_same_however_the_tokens_are_split():
    policy = torch.full((10,), -1.0, dtype=torch.float64)
    advantages = tensor(*[1.0] * 2, *[-1.0] * 8)
    mask = torch.ones(10, dtype=torch.bool)
    for cut in (2, 5, 10):
        parts = [
            ppo_clip_loss(policy[s], policy[s], advantages[s], mask[s], eps_low=0.2, eps_high=0.28)
            for s in (slice(0, cut), slice(cut, 10))
        ]
        total = sum(p.loss_sum.item() for p in parts) / sum(p.normaliser.item() for p in parts)
        assert -total == pytest.approx(-0.6)


def test_a_flat_token_whose_ratio_overflows_has_zero_gradient_and_not_nan():
    policy = tensor(0.0).requires_grad_()
    out = ppo_clip_loss(
        policy, tensor(-1000.0), tensor(1.0), torch.tensor([True]), eps_low=0.2, eps_high=0.28
    )
    out.loss_sum.backward()
    assert out.loss_sum.item() == pytest.approx(-1.28)
    assert policy.grad.item() == 0.0


def test_nothing_trained_gives_zero_and_not_nan():
    out = losses.icepop(inputs(train_mask=torch.tensor([False, False, False])))
    assert (out.loss_sum.item(), out.normaliser.item(), out.num_rejected.item()) == (0, 0, 0)


def test_truncated_weights_cap_large_ratios_only():
    assert truncated_weights(tensor(0.1, 2.0, 9.0), cap=2.0).tolist() == [0.1, 2.0, 2.0]


def test_a_shape_mistake_is_caught():
    with pytest.raises(Exception, match="tokens"):
        double_sided_loss(
            tensor(-1.0, -2.0),
            tensor(-1.0, -2.0),
            tensor(1.0),
            torch.tensor([True, True]),
            low=0.7,
            high=6.0,
        )


def test_losses_and_baselines_satisfy_their_protocols():
    assert isinstance(losses.icepop, PolicyLoss)
    assert isinstance(group_advantages, AdvantageFn)
    assert not isinstance("longarc.algos.losses:icepop", PolicyLoss)


def test_the_warm_up_moves_from_the_first_step_and_ends_at_the_peak():
    rates = [warmup_constant(step, peak=4.0, warmup_steps=4) for step in range(6)]
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert warmup_constant(0, peak=4.0, warmup_steps=0) == 4.0


@pytest.mark.parametrize(("schedule", "middle"), [(warmup_cosine, 5.5), (warmup_linear, 5.5)])
def test_a_decay_ends_at_its_final_rate_and_stays_there(schedule, middle):
    rates = [
        schedule(step, peak=10.0, final=1.0, warmup_steps=2, total_steps=12) for step in range(15)
    ]
    assert rates[:2] == [5.0, 10.0]
    assert rates[6] == pytest.approx(middle)
    assert rates[11:] == [1.0] * 4
    assert rates[1:12] == sorted(rates[1:12], reverse=True)


def test_a_stage_shorter_than_its_warm_up_still_has_a_rate():
    assert warmup_cosine(0, peak=1.0, final=0.1, warmup_steps=4, total_steps=2) == 0.25
    assert warmup_cosine(5, peak=1.0, final=0.1, warmup_steps=4, total_steps=2) == 0.1


def test_the_control_plane_can_filter_without_torch():
    code = "import sys, longarc.algos.filters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
