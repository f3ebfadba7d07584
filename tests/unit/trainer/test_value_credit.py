"""Rewards of whole rollouts, spread over the trained tokens of their segments."""

import random

import numpy as np
import pytest
import torch
from trainer_fixtures import make_trajectory

from longarc.algos.gae import length_adaptive_lambda, skip_observation_gae
from longarc.errors import ConfigError, ContractError
from longarc.records.outcome import Outcome
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.trainer.credit import TrainItem
from longarc.trainer.value_credit import GaeSettings, ends_in_a_cut, value_credit

POISON = 1e6
"""Value of every token that is not trained: nothing may read it."""


def segment(mask, *, order=0):
    mask = tuple(map(bool, mask))
    return Segment(
        token_ids=tuple(range(len(mask))),
        is_sampled=mask,
        train_mask=mask,
        behaviour_logprobs=(0.0,) * len(mask),
        policy_versions=tuple(0 if m else NOT_SAMPLED for m in mask),
        order=order,
    )


def rollout(masks, *, name="a", reward=1.0, outcome=Outcome.COMPLETED):
    """Items of one trajectory, a segment for each mask."""
    segments = [segment(mask, order=order) for order, mask in enumerate(masks)]
    trajectory = make_trajectory(segments, name=name, reward=reward, outcome=outcome)
    return [
        TrainItem(
            trajectory=trajectory,
            segment=own,
            advantages=np.zeros(len(own.token_ids)),
            token_weight=1.0,
        )
        for own in segments
    ]


def placed(item, values):
    """Put the values of trained tokens at their positions."""
    column = np.full(len(item.segment.token_ids), POISON)
    column[np.flatnonzero(item.segment.train_mask)] = values
    return column


def credit(items, values, *, penalties=None, **settings):
    return value_credit(items, values, GaeSettings(**settings), penalties=penalties or {})


MASK = [0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0]
VALUES = [0.50, 0.45, 0.55, 0.60, 0.70, 0.75, 0.85]
"""Of SAO's worked example, without observations (docs of the recipe, section 4.2)."""


def test_a_rollout_of_one_segment_is_skip_observation_gae_with_a_lambda_for_its_length():
    items = rollout([MASK])
    given = [placed(items[0], VALUES)]
    got = credit(items, given, alpha=1.5)
    expected = [0.331882, 0.422080, 0.355984, 0.338192, 0.263265, 0.235714, 0.15]
    trained = np.flatnonzero(MASK)
    assert got.advantages[0][trained] == pytest.approx(expected, abs=1e-6)
    assert not got.advantages[0][[0, 4, 5, 8, 11]].any()
    assert got.returns[0][trained].tolist() == [1.0] * 7

    rewards = [0.0] * len(MASK)
    rewards[10] = 1.0
    lam = length_adaptive_lambda(7, alpha=1.5)
    values, mask = given[0].tolist(), [bool(m) for m in MASK]
    reference, _ = skip_observation_gae(rewards, values, mask, gamma=1.0, lam=lam)
    assert got.advantages[0] == pytest.approx(reference.numpy(), abs=1e-12)


SEGMENTS = [[0, 1, 1, 1], [0, 0, 1, 0, 1], [0, 1, 1, 1, 1, 0]]
SEGMENT_VALUES = [[0.5, 0.45, 0.6], [0.55, 0.65], [0.6, 0.7, 0.75, 0.9]]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (
            "rollout",
            [
                [0.272123, 0.327922, 0.252068],
                [0.311707, 0.257260],
                [0.354280, 0.274623, 0.242593, 0.1],
            ],
        ),
        (
            "segment",
            [
                [0.068326, 0.102080, 0.088551],
                [0.065844, 0.069136],
                [0.303704, 0.244444, 0.233333, 0.1],
            ],
        ),
    ],
)
def test_segments_of_a_rollout_are_one_trajectory(scope, expected):
    items = rollout(SEGMENTS)
    values = [placed(item, own) for item, own in zip(items, SEGMENT_VALUES, strict=True)]
    got = credit(items, values, alpha=1.5, lambda_scope=scope)
    for own, mask, numbers in zip(got.advantages, SEGMENTS, expected, strict=True):
        assert own[np.flatnonzero(mask)] == pytest.approx(numbers, abs=1e-6)
    assert all(
        set(own[np.flatnonzero(m)]) == {1.0} for own, m in zip(got.returns, SEGMENTS, strict=True)
    )


def test_segments_meet_whatever_order_they_come_in():
    items = rollout(SEGMENTS) + rollout([MASK], name="b", reward=0.0)
    values = [placed(item, own) for item, own in zip(items, [*SEGMENT_VALUES, VALUES], strict=True)]
    together = credit(items, values)
    order = [2, 3, 0, 1]
    random.Random(0).shuffle(order)
    shuffled = credit([items[i] for i in order], [values[i] for i in order])
    for place, index in enumerate(order):
        assert np.array_equal(shuffled.advantages[place], together.advantages[index])
        assert np.array_equal(shuffled.returns[place], together.returns[index])


@pytest.mark.parametrize(
    "outcome", [Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS, Outcome.TIMED_OUT]
)
def test_a_rollout_that_a_limit_ended_may_be_worth_the_state_it_was_left_in(outcome):
    items = rollout(SEGMENTS, reward=0.25, outcome=outcome)
    values = [placed(item, own) for item, own in zip(items, SEGMENT_VALUES, strict=True)]
    assert ends_in_a_cut(items, GaeSettings()) == [False] * 3
    assert ends_in_a_cut(items, GaeSettings(bootstraps_truncated=True)) == [False, False, True]
    assert credit(items, values).returns[0][1] == 0.25

    behind = [*values[:2], np.append(values[2], 0.8)]
    got = credit(items, behind, bootstraps_truncated=True, gamma=0.5)
    # R + gamma V for the last token, and half of that for each token before it in its segment.
    assert got.returns[2][[4, 3, 2, 1]] == pytest.approx([0.65, 0.325, 0.1625, 0.08125])
    assert got.returns[0][3] == pytest.approx(0.65)
    assert len(got.returns[2]) == 6


def test_a_rollout_that_ended_by_itself_is_never_bootstrapped():
    items = rollout([MASK])
    assert ends_in_a_cut(items, GaeSettings(bootstraps_truncated=True)) == [False]


def test_a_penalty_is_taken_off_the_reward_of_its_trajectory_alone():
    items = rollout([MASK]) + rollout([MASK], name="b")
    values = [placed(item, VALUES) for item in items]
    got = credit(items, values, penalties={"b": -0.5})
    assert [own[1] for own in got.returns] == [1.0, 0.5]


def test_a_trajectory_without_a_reward_is_refused():
    items = rollout([MASK], reward=None)
    with pytest.raises(ContractError, match="trajectory a has no reward for a critic"):
        credit(items, [placed(items[0], VALUES)])


@pytest.mark.parametrize(
    "settings", [{"gamma": 1.1}, {"alpha": -1.0}, {"alpha": None, "lam": 2.0}, {"lam": 0.5}]
)
def test_settings_out_of_range_are_refused(settings):
    items = rollout([MASK])
    with pytest.raises(ConfigError):
        credit(items, [placed(items[0], VALUES)], **settings)


def test_advantages_at_lambda_one_are_return_minus_value():
    generator = torch.Generator().manual_seed(0)
    items = rollout([MASK], reward=0.7)
    values = placed(items[0], torch.rand(7, generator=generator).double().numpy())
    got = credit(items, [values], alpha=None, lam=1.0)
    trained = np.flatnonzero(MASK)
    assert got.advantages[0][trained] == pytest.approx(0.7 - values[trained], abs=1e-12)
