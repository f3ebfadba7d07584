"""Baselines of single groups, and of none."""

import torch

from longarc.algos.advantages import (
    leave_one_out_baselines,
    rloo_advantages,
    running_mean_advantages,
)
from longarc.algos.protocols import AdvantageFn
from longarc.algos.reinforce_plus_plus import batch_normalised, carried_returns


def test_each_member_is_compared_with_the_mean_of_the_others():
    rewards = [1.0, 0.0, 0.5]
    assert leave_one_out_baselines(rewards).tolist() == [0.25, 0.75, 0.5]
    assert rloo_advantages(rewards).tolist() == [0.75, -0.75, 0.0]
    assert isinstance(rloo_advantages, AdvantageFn)


def test_a_group_of_one_has_nobody_to_compare_with():
    assert rloo_advantages([3.0]).tolist() == [0.0]
    assert rloo_advantages([]).tolist() == []


def test_a_running_mean_compares_the_first_rollouts_with_each_other():
    first, history = running_mean_advantages([1.0, 0.0], (), window=3)
    assert first.tolist() == [0.5, -0.5]
    second, history = running_mean_advantages([1.0, 1.0], history, window=3)
    assert second.tolist() == [0.5, 0.5]
    assert history == (0.0, 1.0, 1.0)
    nothing, history = running_mean_advantages([], history, window=2)
    assert len(nothing) == 0
    assert history == (1.0, 1.0)
    assert running_mean_advantages([], (), window=2)[0].tolist() == []


def test_a_return_is_carried_over_an_observation_and_not_discounted_by_it():
    rewards, mask = [0.0, 0.0, 0.0, 1.0, 0.0], [True, False, False, True, False]
    assert carried_returns(rewards, mask, gamma=0.5).tolist() == [0.5, 0.0, 0.0, 1.0, 0.0]


def test_a_batch_that_is_all_alike_or_empty_has_no_advantage():
    for values, weights in (([2.0, 2.0], [1.0, 3.0]), ([1.0, 2.0], [0.0, 0.0]), ([], [])):
        result = batch_normalised(torch.tensor(values), torch.tensor(weights))
        assert result.tolist() == [0.0] * len(values)


def test_a_batch_is_normalised_by_its_tokens():
    # mean 0.25 and deviation sqrt(3)/4 of one token with 1 and three with 0.
    result = batch_normalised(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0]), eps=0.0)
    expected = torch.tensor([3**0.5, -(3**-0.5)], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
