"""What holds of every policy loss and of group statistics, whatever the numbers."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longarc.algos import losses
from longarc.algos.advantages import group_advantages
from longarc.algos.filters import is_stale, is_zero_variance, repair_group
from longarc.algos.protocols import LossInputs

LOSSES = [losses.icepop, losses.double_sided, losses.ppo_clip]
FIELDS = [
    "policy_logprobs",
    "proximal_logprobs",
    "behaviour_logprobs",
    "advantages",
    "token_weights",
]


def logprobs(size):
    return st.lists(st.floats(-6, 0), min_size=size, max_size=size)


@st.composite
def batches(draw, min_size=2):
    size = draw(st.integers(min_size, 12))
    columns = {name: draw(logprobs(size)) for name in FIELDS[:3]}
    columns["advantages"] = draw(st.lists(st.floats(-3, 3), min_size=size, max_size=size))
    columns["token_weights"] = draw(st.lists(st.floats(0.1, 3), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return tensors | {"train_mask": torch.tensor(mask)}


def run(loss, columns):
    policy = columns["policy_logprobs"].clone().requires_grad_()
    out = loss(LossInputs(**(columns | {"policy_logprobs": policy})))
    (grad,) = torch.autograd.grad(out.loss_sum, policy)
    return out.loss_sum.item(), out.normaliser.item(), out.num_rejected.item(), grad


def take(columns, index):
    return {name: values[index] for name, values in columns.items()}


@pytest.mark.parametrize("loss", LOSSES)
@given(columns=batches(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_order_of_tokens_does_not_matter(loss, columns, data):
    order = torch.tensor(data.draw(st.permutations(range(len(columns["train_mask"])))))
    value, normaliser, rejected, grad = run(loss, columns)
    shuffled = run(loss, take(columns, order))
    assert shuffled[:3] == pytest.approx((value, normaliser, rejected), abs=1e-9)
    torch.testing.assert_close(shuffled[3], grad[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@given(columns=batches(), data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_split_into_micro_batches_adds_up_to_the_whole(loss, columns, data):
    size = len(columns["train_mask"])
    cut = data.draw(st.integers(1, size - 1))
    whole = run(loss, columns)
    parts = [run(loss, take(columns, s)) for s in (slice(0, cut), slice(cut, size))]
    assert [a + b for a, b in zip(parts[0][:3], parts[1][:3], strict=True)] == pytest.approx(
        whole[:3], abs=1e-9
    )
    torch.testing.assert_close(torch.cat([p[3] for p in parts]), whole[3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@given(
    columns=batches(),
    field=st.sampled_from(FIELDS),
    poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
)
@settings(deadline=None, max_examples=150)
def test_masked_tokens_cannot_leak_whatever_they_hold(loss, columns, field, poison):
    mask = columns["train_mask"]
    clean = run(loss, columns)
    dirty = columns | {field: columns[field].masked_fill(~mask, poison)}
    value, normaliser, rejected, grad = run(loss, dirty)
    assert (value, normaliser, rejected) == clean[:3]
    assert torch.equal(grad, clean[3])
    assert not grad[~mask].any()


@pytest.mark.parametrize("loss", LOSSES)
@given(columns=batches(), jump=st.sampled_from([1000.0, -1000.0]))
@settings(deadline=None, max_examples=60)
def test_an_overflowing_engine_mismatch_gives_finite_gradients(loss, columns, jump):
    behaviour = columns["behaviour_logprobs"].clone()
    behaviour[0] += jump
    value, _, _, grad = run(loss, columns | {"behaviour_logprobs": behaviour})
    assert math.isfinite(value)
    assert grad.isfinite().all()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.floats(0.5, 4), st.floats(-9, 9))
@settings(deadline=None)
def test_group_advantages_are_centred_and_ignore_shift_and_scale(rewards, scale, shift):
    spread = torch.tensor(rewards, dtype=torch.float64).std(correction=1).item()
    assume(spread > 1e-2)
    advantages = group_advantages(rewards)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-9)
    moved = group_advantages([scale * r + shift for r in rewards])
    torch.testing.assert_close(moved, advantages, rtol=1e-3, atol=1e-3)
    assert advantages[rewards.index(max(rewards))] == advantages.max()


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=9))
@settings(deadline=None)
def test_a_group_is_zero_variance_exactly_when_its_advantages_are_zero(rewards):
    assert is_zero_variance(rewards) == (not group_advantages(rewards).any())


@given(st.lists(st.integers(0, 20), unique=True, max_size=9), st.integers(1, 9))
def test_repair_keeps_every_valid_member_and_repeats_evenly(valid, group_size):
    valid = valid[:group_size]
    padded = repair_group(valid, group_size=group_size)
    if 2 * len(valid) <= group_size:
        assert padded is None
        return
    assert len(padded) == group_size
    counts = [padded.count(index) for index in valid]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 30), st.integers(0, 9))
def test_a_token_is_stale_exactly_when_its_lag_exceeds_the_limit(versions, current, limit):
    stale = is_stale(versions, current_version=current, max_lag_steps=limit)
    assert stale == any(current - version > limit for version in versions)
