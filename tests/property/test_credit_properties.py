"""What holds of advantages, returns and weights, whatever the numbers."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longarc.algos.actor_critic import kl_constrained_loss, step_advantages
from longarc.algos.advantages import (
    group_advantages,
    leave_one_out_baselines,
    rloo_advantages,
    running_mean_advantages,
)
from longarc.algos.filters import is_in_difficulty_window, is_zero_variance
from longarc.algos.gae import cross_trajectory_gae, skip_observation_gae, token_gae
from longarc.algos.reductions import token_weights
from longarc.algos.reinforce_plus_plus import batch_normalised, carried_returns
from longarc.algos.replay import is_worth_replaying, perplexity
from longarc.algos.shaping import overlong_penalty

NUMBERS = st.floats(-5, 5)
FACTORS = st.floats(0, 1)
POISON = st.sampled_from([math.nan, math.inf, -math.inf, 1e300])


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def assert_close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@st.composite
def trajectories(draw, min_size=1, max_size=10):
    """Draw rewards and values of some tokens, all sampled."""
    size = draw(st.integers(min_size, max_size))
    return [draw(st.lists(NUMBERS, min_size=size, max_size=size)) for _ in range(2)]


@given(trajectories(), FACTORS, FACTORS, NUMBERS, st.data(), POISON)
@settings(deadline=None)
def test_observations_anywhere_change_no_advantage_whatever_their_values(
    trajectory, gamma, lam, bootstrap, data, poison
):
    rewards, values = trajectory
    factors = {"gamma": gamma, "lam": lam, "bootstrap_value": bootstrap}
    plain = token_gae(rewards, values, **factors)
    spread = [[], [], []]
    for reward, value in zip(rewards, values, strict=True):
        num_observed = data.draw(st.integers(0, 2))
        spread[0] += [0.0] * num_observed + [reward]
        spread[1] += [poison] * num_observed + [value]
        spread[2] += [False] * num_observed + [True]
    spread = [
        [*column, filler] for column, filler in zip(spread, (0.0, poison, False), strict=True)
    ]
    results = skip_observation_gae(*spread, **factors)
    is_action = torch.tensor(spread[2])
    for one, other in zip(results, plain, strict=True):
        assert torch.equal(one[is_action], other)
        assert not one[~is_action].any()


@given(trajectories(), FACTORS)
@settings(deadline=None)
def test_with_lambda_1_returns_are_the_discounted_rewards_whatever_the_critic_says(
    trajectory, gamma
):
    rewards, values = trajectory
    _, returns = token_gae(rewards, values, gamma=gamma, lam=1.0)
    expected = [
        math.fsum(gamma**k * reward for k, reward in enumerate(rewards[t:]))
        for t in range(len(rewards))
    ]
    assert_close(returns, double(expected))
    carried = carried_returns(rewards, [True] * len(rewards), gamma=gamma)
    assert_close(carried, double(expected))


@given(trajectories(), FACTORS, NUMBERS)
@settings(deadline=None)
def test_with_lambda_0_the_advantage_is_the_error_of_one_step(trajectory, gamma, bootstrap):
    rewards, values = trajectory
    advantages, _ = token_gae(rewards, values, gamma=gamma, lam=0.0, bootstrap_value=bootstrap)
    following = [*values[1:], bootstrap]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    assert_close(advantages, double(errors))


@given(trajectories(min_size=2), FACTORS, FACTORS, st.data())
@settings(deadline=None)
def test_a_trajectory_that_is_cut_off_and_bootstrapped_with_what_came_keeps_its_advantages(
    trajectory, gamma, lam, data
):
    rewards, values = trajectory
    cut = data.draw(st.integers(1, len(rewards) - 1))
    whole, _ = token_gae(rewards, values, gamma=gamma, lam=lam)
    # What GAE hands back over the cut is V + lam A: with lambda 1 the return, with lambda 0 the value.
    following = values[cut] + lam * whole[cut].item()
    part, _ = token_gae(
        rewards[:cut], values[:cut], gamma=gamma, lam=lam, bootstrap_value=following
    )
    assert_close(part, whole[:cut], 1e-7)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), NUMBERS, FACTORS, FACTORS, NUMBERS)
@settings(deadline=None)
def test_without_a_critic_segments_are_exactly_one_trajectory(
    lengths, reward, gamma, lam, bootstrap
):
    advantages, targets = cross_trajectory_gae(
        [[0.0] * length for length in lengths],
        terminal_reward=reward,
        gamma=gamma,
        lam=lam,
        bootstrap_value=bootstrap,
    )
    rewards = [0.0] * (sum(lengths) - 1) + [reward]
    whole, _ = token_gae(
        rewards, [0.0] * sum(lengths), gamma=gamma, lam=lam, bootstrap_value=bootstrap
    )
    assert_close(torch.cat(advantages), whole)
    assert [len(target) for target in targets] == lengths


@given(st.lists(NUMBERS, min_size=2, max_size=9), st.data())
@settings(deadline=None)
def test_group_statistics_do_not_depend_on_the_order_of_members(rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = [rewards[i] for i in order]
    for advantages in (group_advantages, leave_one_out_baselines, rloo_advantages):
        if advantages is group_advantages:
            assume(torch.tensor(rewards).std().item() > 1e-3)
        assert_close(advantages(shuffled), advantages(rewards)[order], 1e-6)


@given(st.lists(NUMBERS, min_size=2, max_size=9), st.data(), NUMBERS)
@settings(deadline=None)
def test_a_member_is_compared_with_the_others_alone(rewards, data, other):
    index = data.draw(st.integers(0, len(rewards) - 1))
    changed = [other if i == index else reward for i, reward in enumerate(rewards)]
    before, after = leave_one_out_baselines(rewards)[index], leave_one_out_baselines(changed)[index]
    assert_close(before, after)
    rest = [reward for i, reward in enumerate(rewards) if i != index]
    assert before.item() == pytest.approx(math.fsum(rest) / len(rest), abs=1e-9)


@given(st.lists(NUMBERS, min_size=2, max_size=9))
@settings(deadline=None)
def test_rloo_is_the_centred_reward_scaled_up(rewards):
    size = len(rewards)
    centred = double(rewards) - math.fsum(rewards) / size
    assert_close(rloo_advantages(rewards), centred * size / (size - 1))


@given(st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=5), st.integers(1, 6))
@settings(deadline=None)
def test_a_running_mean_looks_at_the_last_rewards_before_a_step_and_no_others(steps, window):
    history: tuple[float, ...] = ()
    seen: list[float] = []
    for rewards in steps:
        advantages, history = running_mean_advantages(rewards, history, window=window)
        known = seen[-window:] or rewards
        baseline = math.fsum(known) / len(known) if known else 0.0
        assert_close(advantages, double([reward - baseline for reward in rewards]))
        seen += rewards
        assert history == tuple(seen[-window:])


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 4)), min_size=1, max_size=12), st.data(), POISON)
@settings(deadline=None)
def test_normalising_a_batch_counts_tokens_whoever_holds_them(pairs, data, poison):
    values, counts = double([v for v, _ in pairs]), double([float(n) for _, n in pairs])
    used = counts > 0
    result = batch_normalised(values, counts)
    # One entry for each token, in any order, is the same as one for each trajectory with its number of tokens.
    repeated = torch.repeat_interleave(values, counts.long())
    order = torch.tensor(data.draw(st.permutations(range(len(repeated)))), dtype=torch.long)
    by_token = batch_normalised(repeated[order], torch.ones(len(repeated)))
    assert_close(by_token, torch.repeat_interleave(result, counts.long())[order], 1e-6)
    assert_close((counts * result).sum(), double(0.0), 1e-6)
    dirty = batch_normalised(values.masked_fill(~used, poison), counts)
    assert torch.equal(dirty, result)
    assert not result[~used].any()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    )
)
@settings(deadline=None)
def test_each_reduction_counts_what_it_says(group):
    lengths, copies = [list(row) for row, _ in group], [n for _, n in group]

    def total(reduction):
        weights = token_weights(lengths, copies, reduction=reduction)
        return math.fsum(
            w * n
            for row, counts in zip(weights, lengths, strict=True)
            for w, n in zip(row, counts, strict=True)
        )

    pairs = list(zip(lengths, copies, strict=True))
    tokens = sum(n * sum(row) for row, n in pairs)
    assert total("token_mean") == tokens
    assert total("sequence_mean") == pytest.approx(sum(n for row, n in pairs if any(row)))
    assert total("segment_mean") == pytest.approx(
        sum(n for row, n in pairs for length in row if length)
    )
    assert total("group_mean") == pytest.approx(1.0 if tokens else 0.0)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8))
def test_of_right_and_wrong_dynamic_sampling_keeps_the_open_window(rewards):
    inside = is_in_difficulty_window(rewards, low=1e-9, high=1 - 1e-9)
    assert inside is not is_zero_variance(rewards)


@given(st.integers(0, 60), st.integers(1, 50), st.data())
def test_a_longer_rollout_never_loses_less(num_tokens, max_tokens, data):
    cache = data.draw(st.integers(1, max_tokens))
    limits = {"max_tokens": max_tokens, "cache_tokens": cache}
    here, further = (overlong_penalty(n, **limits) for n in (num_tokens, num_tokens + 1))
    assert -1.0 <= further <= here <= 0.0
    assert here - further <= 1.0 / cache + 1e-12


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=8))
def test_an_action_is_replayed_exactly_inside_the_window(logprobs):
    likely = math.exp(math.fsum(logprobs) / len(logprobs))
    assume(abs(likely - 0.5) > 1e-9)
    assume(abs(likely - 0.95) > 1e-9)
    assert perplexity(logprobs) == pytest.approx(1 / likely)
    assert is_worth_replaying(logprobs) is (0.5 <= likely <= 0.95)


@given(trajectories(), FACTORS)
@settings(deadline=None)
def test_the_mixture_of_web_rl_ends_at_the_return_and_at_one_step(trajectory, gamma):
    rewards, values = trajectory
    by_return = step_advantages(rewards, values, gamma=gamma, lam=0.0)
    by_step = step_advantages(rewards, values, gamma=gamma, lam=1.0)
    assert_close(by_return, token_gae(rewards, values, gamma=gamma, lam=1.0)[0])
    assert_close(by_step, token_gae(rewards, values, gamma=gamma, lam=0.0)[0])
    half = step_advantages(rewards, values, gamma=gamma, lam=0.5)
    assert_close(half, 0.5 * (by_return + by_step))


@given(
    st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.integers(0, 2), st.booleans()),
             min_size=1, max_size=9),
    st.floats(0.1, 3),
    st.data(),
    POISON,
)  # fmt: skip
@settings(deadline=None)
def test_the_constrained_actor_is_regressed_action_by_action(tokens, beta, data, poison):
    policy, reference = (double([row[k] for row in tokens]) for k in range(2))
    ids, mask = torch.tensor([row[2] for row in tokens]), torch.tensor([row[3] for row in tokens])
    advantages = double(data.draw(st.lists(NUMBERS, min_size=3, max_size=3)))

    def run(index, policy):
        leaf = policy[index].clone().requires_grad_()
        out = kl_constrained_loss(
            leaf, reference[index], advantages, ids[index], mask[index], beta=beta
        )
        return out, torch.autograd.grad(out.loss_sum, leaf)[0]

    everything = torch.arange(len(tokens))
    whole, grad = run(everything, policy)
    expected = 0.0
    slope = torch.zeros(len(tokens), dtype=torch.float64)
    for action in range(3):
        own = mask & (ids == action)
        if own.any():
            error = beta * (policy - reference)[own].sum() - advantages[action]
            expected += error.item() ** 2
            slope[own] = 2 * beta * error
    assert whole.loss_sum.item() == pytest.approx(expected, abs=1e-9)
    assert_close(grad, slope)
    assert whole.normaliser.item() == len(set(ids[mask].tolist()))
    parts = [run((ids == action).nonzero()[:, 0], policy)[0] for action in range(3)]
    assert math.fsum(p.loss_sum.item() for p in parts) == pytest.approx(expected, abs=1e-9)
    dirty, dirty_grad = run(everything, policy.masked_fill(~mask, poison))
    assert torch.equal(dirty.loss_sum, whole.loss_sum)
    assert torch.equal(dirty_grad, grad)
