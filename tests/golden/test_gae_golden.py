"""Golden numbers of generalised advantage estimation, float64."""

import json
from pathlib import Path

import pytest
import torch

from longarc.algos.gae import (
    cross_trajectory_gae,
    length_adaptive_lambda,
    skip_observation_gae,
    token_gae,
)

DATA = Path(__file__).parent / "data"


def load(name):
    return json.loads((DATA / f"{name}.json").read_text())


def case_ids(name):
    return [pytest.param(case, id=case["name"]) for case in load(name)["cases"]]


def floats(numbers):
    return [float(number) for number in numbers]


def mask_of(case):
    return [bool(flag) for flag in case["action_mask"]]


def assert_equals(tensor, expected):
    torch.testing.assert_close(
        tensor, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


def assert_all_equal(tensors, expected):
    assert len(tensors) == len(expected)
    for tensor, numbers in zip(tensors, expected, strict=True):
        assert_equals(tensor, floats(numbers))


@pytest.mark.parametrize("case", case_ids("gae_token"))
def test_token_gae_matches_advantages_and_returns(case):
    advantages, returns = token_gae(
        floats(case["rewards"]),
        floats(case["values"]),
        gamma=case["gamma"],
        lam=case["lam"],
        bootstrap_value=case["bootstrap"],
    )
    assert_equals(advantages, case["advantages"])
    assert_equals(returns, case["returns"])


@pytest.mark.parametrize("case", case_ids("gae_skip_observation"))
def test_gae_steps_over_observations_whatever_their_values(case):
    advantages, returns = skip_observation_gae(
        torch.tensor(floats(case["rewards"]), dtype=torch.float64),
        torch.tensor(floats(case["values"]), dtype=torch.float64),
        torch.tensor(mask_of(case)),
        gamma=case["gamma"],
        lam=case["lam"],
        bootstrap_value=case["bootstrap"],
    )
    assert_equals(advantages, case["advantages"])
    assert_equals(returns, case["returns"])
    if not all(case["action_mask"]):
        naive = torch.tensor(case["naive_wrong_advantages"], dtype=torch.float64)
        assert not torch.allclose(advantages, naive, rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", load("gae_length_adaptive")["meta"]["lambda_table"])
def test_lambda_grows_with_the_length_and_is_never_negative(row):
    lam = length_adaptive_lambda(row["l"], alpha=row["alpha"])
    assert lam == pytest.approx(row["lam"], abs=1e-15)


@pytest.mark.parametrize("case", case_ids("gae_length_adaptive"))
def test_the_policy_uses_the_adaptive_lambda_and_the_critic_one(case):
    rewards, values, mask = floats(case["rewards"]), floats(case["values"]), mask_of(case)
    lam = length_adaptive_lambda(sum(mask), alpha=case["alpha"])
    assert lam == pytest.approx(case["lam_policy"], abs=1e-15)
    advantages, _ = skip_observation_gae(rewards, values, mask, gamma=case["gamma"], lam=lam)
    _, targets = skip_observation_gae(rewards, values, mask, gamma=case["gamma"], lam=1.0)
    assert_equals(advantages, case["advantages"])
    assert_equals(targets, case["critic_targets"])


@pytest.mark.parametrize("case", case_ids("gae_cross_trajectory"))
def test_segments_are_discounted_as_if_they_were_one_trajectory(case):
    shared = {"terminal_reward": float(case["terminal_reward"]), "gamma": case["gamma"]}
    values = [floats(row) for row in case["segment_values"]]
    scale = (
        {"lam": case["recommended"]["lam"]} if case["alpha"] is None else {"alpha": case["alpha"]}
    )
    advantages, targets = cross_trajectory_gae(values, **shared, **scale)
    assert_all_equal(advantages, case["recommended"]["advantages"])
    assert_all_equal(targets, case["recommended"]["critic_targets"])

    by_segment, _ = cross_trajectory_gae(values, **shared, **scale, lambda_scope="segment")
    assert_all_equal(by_segment, case["variant_per_segment_lambda"]["advantages"])

    whole, _ = token_gae(
        [0.0] * (sum(case["n"]) - 1) + [shared["terminal_reward"]],
        [value for row in values for value in row],
        gamma=case["gamma"],
        lam=case["lam_whole_rollout"],
    )
    assert_all_equal(whole.split(case["n"]), case["concatenated_gae_reference"])
    if not any(map(any, values)):
        torch.testing.assert_close(torch.cat(advantages), whole, rtol=0, atol=1e-12)
