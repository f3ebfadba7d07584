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

LOSSES = [
    losses.icepop,
    losses.double_sided,
    losses.ppo_clip,
    losses.behaviour_ppo,
    losses.cispo,
    losses.gspo,
    losses.opsm,
    losses.truncated,
    losses.masked,
    losses.masked_by_sequence,
    losses.masked_by_geometric_mean,
]
FIELDS = [
    "policy_logprobs",
    "proximal_logprobs",
    "behaviour_logprobs",
    "advantages",
    "token_weights",
]


@st.composite
def batches(draw, loss, max_sequences=4):
    """Draw tokens of a few segments, in any order of tokens."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=max_sequences))
    ids = [index for index, length in enumerate(lengths) for _ in range(length)]
    size = len(ids)

    def column(low, high, count=size):
        return draw(st.lists(st.floats(low, high), min_size=count, max_size=count))

    columns = {name: column(-6, 0) for name in FIELDS[:3]}
    # The geometric mean and GSPO's ratio are only alive close to 1.
    if draw(st.booleans()):
        columns["behaviour_logprobs"] = [
            logprob + gap
            for logprob, gap in zip(columns["policy_logprobs"], column(-3e-3, 3e-3), strict=True)
        ]
    of_sequence = column(-3, 3, len(lengths))
    noise = [0.0] * size if loss is losses.gspo else column(-3, 3)
    columns["advantages"] = [of_sequence[i] + x for i, x in zip(ids, noise, strict=True)]
    columns["token_weights"] = column(0.1, 3)
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return tensors | {"train_mask": torch.tensor(mask), "sequence_ids": torch.tensor(ids)}


def run(loss, columns):
    policy = columns["policy_logprobs"].clone().requires_grad_()
    # In training the proximal policy is this very pass.
    proximal = policy.detach() if loss is losses.truncated else columns["proximal_logprobs"]
    changed = {"policy_logprobs": policy, "proximal_logprobs": proximal}
    out = loss(LossInputs(**(columns | changed)))
    (grad,) = torch.autograd.grad(out.loss_sum, policy)
    return out.loss_sum.item(), out.normaliser.item(), out.num_rejected.item(), grad


def take(columns, index):
    return {name: values[index] for name, values in columns.items()}


def assert_same(one, other):
    assert one[:3] == pytest.approx(other[:3], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(one[3], other[3], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_order_of_tokens_does_not_matter(loss, data):
    columns = data.draw(batches(loss))
    order = torch.tensor(data.draw(st.permutations(range(len(columns["train_mask"])))))
    whole = run(loss, columns)
    assert_same(run(loss, take(columns, order)), (*whole[:3], whole[3][order]))


@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_split_between_segments_adds_up_to_the_whole(loss, data):
    """Micro-batches and ranks alike: both deal whole segments, each to one place."""
    columns = data.draw(batches(loss))
    ids = columns["sequence_ids"]
    count = int(ids.max()) + 1
    place = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    where = [torch.tensor([place[i] == k for i in ids.tolist()]).nonzero()[:, 0] for k in range(4)]
    parts = [run(loss, take(columns, index)) for index in where]
    sums = [math.fsum(part[k] for part in parts) for k in range(3)]
    grad = torch.zeros(len(ids), dtype=torch.float64)
    for index, part in zip(where, parts, strict=True):
        grad[index] = part[3]
    assert_same((*sums, grad), run(loss, columns))


@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data(), poison=st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
@settings(deadline=None, max_examples=60)
def test_padding_changes_nothing(loss, data, poison):
    columns = data.draw(batches(loss))
    size, extra = len(columns["train_mask"]), data.draw(st.integers(1, 3))
    padded = {name: torch.cat([columns[name], torch.full((extra,), poison)]) for name in FIELDS}
    padded["train_mask"] = torch.cat([columns["train_mask"], torch.zeros(extra, dtype=torch.bool)])
    # Padding of the last segment, and a segment that is padding as a whole.
    last = int(columns["sequence_ids"].max())
    more = torch.tensor(
        data.draw(st.lists(st.integers(last, last + 1), min_size=extra, max_size=extra))
    )
    padded["sequence_ids"] = torch.cat([columns["sequence_ids"], more])
    value, normaliser, rejected, grad = run(loss, padded)
    assert not grad[size:].any()
    assert_same((value, normaliser, rejected, grad[:size]), run(loss, columns))


@pytest.mark.parametrize("loss", LOSSES)
@given(
    data=st.data(),
    field=st.sampled_from(FIELDS),
    poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
)
@settings(deadline=None, max_examples=100)
def test_masked_tokens_cannot_leak_whatever_they_hold(loss, data, field, poison):
    columns = data.draw(batches(loss))
    mask = columns["train_mask"]
    clean = run(loss, columns)
    dirty = columns | {field: columns[field].masked_fill(~mask, poison)}
    value, normaliser, rejected, grad = run(loss, dirty)
    assert (value, normaliser, rejected) == clean[:3]
    assert torch.equal(grad, clean[3])
    assert not grad[~mask].any()


@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data(), jump=st.sampled_from([1000.0, -1000.0]))
@settings(deadline=None, max_examples=60)
def test_an_overflowing_engine_mismatch_gives_finite_gradients(loss, data, jump):
    columns = data.draw(batches(loss))
    if loss in (losses.behaviour_ppo, losses.opsm, losses.gspo):
        # A ratio far above 1 with a negative advantage is what PPO's clip leaves open, by design.
        columns["advantages"] = columns["advantages"].abs()
    behaviour = columns["behaviour_logprobs"].clone()
    behaviour[0] += jump
    value, _, _, grad = run(loss, columns | {"behaviour_logprobs": behaviour})
    assert math.isfinite(value)
    assert grad.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_on_policy_every_loss_is_the_plain_policy_gradient(loss, data):
    columns = data.draw(batches(loss))
    policy = columns["policy_logprobs"]
    if loss is losses.gspo:
        # A sequence's ratio is a mean: with equal weights its gradient is spread evenly, as REINFORCE's.
        columns["token_weights"] = torch.ones_like(policy)
    same = columns | {"proximal_logprobs": policy, "behaviour_logprobs": policy}
    grad = run(loss, same)[3]
    mask, weights = columns["train_mask"], columns["token_weights"]
    expected = -(weights * columns["advantages"]).masked_fill(~mask, 0.0)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


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
