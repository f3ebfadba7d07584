"""Credit of whole rollouts, for all of them: what order, observations and segments may not change."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longarc.records.outcome import Outcome
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.trajectory import Trajectory
from longarc.trainer.credit import TrainItem
from longarc.trainer.value_credit import GaeSettings, value_credit

masks = st.lists(st.booleans(), min_size=1, max_size=8).map(lambda own: (False, *own, True))
rollouts = st.lists(st.lists(masks, min_size=1, max_size=3), min_size=1, max_size=3)
gammas = st.sampled_from([1.0, 0.9, 0.5])
numbers = st.floats(-2.0, 2.0)


def items_of(rollouts, rewards):
    items = []
    for index, (own, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        segments = tuple(
            Segment(
                token_ids=tuple(range(len(mask))),
                is_sampled=mask,
                train_mask=mask,
                behaviour_logprobs=(0.0,) * len(mask),
                policy_versions=tuple(0 if m else NOT_SAMPLED for m in mask),
                order=order,
            )
            for order, mask in enumerate(own)
        )
        trajectory = Trajectory(
            id=f"t{index}",
            stage="rl",
            group_id=f"g{index}",
            task_id="task",
            family="f",
            outcome=Outcome.COMPLETED,
            reward=reward,
            reward_parts={},
            segments=segments,
            messages=(),
            tools=(),
            num_turns=1,
            difficulty=0.0,
            started_at_s=0.0,
            duration_s=0.0,
        )
        items += [
            TrainItem(
                trajectory=trajectory,
                segment=segment,
                advantages=np.zeros(len(segment.token_ids)),
                token_weight=1.0,
            )
            for segment in segments
        ]
    return items


@st.composite
def steps(draw):
    own = draw(rollouts)
    items = items_of(own, [draw(numbers) for _ in own])
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    return items, [rng.uniform(-1, 1, len(item.segment.token_ids)) for item in items], seed


def credit(items, values, **settings):
    return value_credit(items, values, GaeSettings(**settings), penalties={})


@given(steps(), gammas)
def test_the_order_of_segments_and_what_stands_on_observations_change_nothing(step, gamma):
    items, values, seed = step
    plain = credit(items, values, gamma=gamma)
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    poisoned = []
    for index in order:
        column = values[index].copy()
        column[~np.asarray(items[index].segment.train_mask)] = np.nan
        poisoned.append(column)
    other = credit([items[index] for index in order], poisoned, gamma=gamma)
    for place, index in enumerate(order):
        assert np.array_equal(other.advantages[place], plain.advantages[index])
        assert np.array_equal(other.returns[place], plain.returns[index])


@given(steps())
def test_at_lambda_one_without_discount_the_advantage_is_reward_minus_value(step):
    items, values, _ = step
    got = credit(items, values, alpha=None, lam=1.0)
    for item, value, own, target in zip(items, values, got.advantages, got.returns, strict=True):
        mask = np.asarray(item.segment.train_mask)
        assert own[mask] == pytest.approx(item.trajectory.reward - value[mask], abs=1e-9)
        assert target[mask] == pytest.approx(item.trajectory.reward, abs=1e-12)
        assert not own[~mask].any()
        assert not target[~mask].any()


@given(st.lists(masks, min_size=1, max_size=4), numbers, gammas)
def test_a_critic_that_expects_nothing_discounts_segments_like_one_rollout(own, reward, gamma):
    """CompactionRL, eq. 15: the exponent is the number of trained tokens that follow."""
    items = items_of([own], [reward])
    values = [np.zeros(len(mask)) for mask in own]
    got = credit(items, values, gamma=gamma, alpha=1.5)
    total = sum(sum(mask) for mask in own)
    factor = gamma * max(0.0, 1 - 1 / (1.5 * total))
    exponents = iter(reversed(range(total)))
    for mask, advantages in zip(own, got.advantages, strict=True):
        expected = [reward * factor ** next(exponents) if trained else 0.0 for trained in mask]
        assert advantages == pytest.approx(expected, abs=1e-9)
