"""Golden numbers of what happens to a group before the loss: advantages, repair, staleness."""

import json
from pathlib import Path

import pytest
import torch

from longarc.algos.advantages import group_advantages
from longarc.algos.filters import is_stale, is_zero_variance, repair_group

DATA = Path(__file__).parent / "data"


def case_ids(name):
    cases = json.loads((DATA / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


def assert_equals(tensor, expected):
    torch.testing.assert_close(
        tensor, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("case", case_ids("grpo_advantage"))
def test_group_advantages_and_the_zero_variance_test_agree_with_the_golden_group(case):
    rewards = [float(r) for r in case["rewards"]]
    assert_equals(group_advantages(rewards), case["ddof1_eps1e-6"]["advantages"])
    assert is_zero_variance(rewards) is case["ddof1_eps1e-6"]["zero_std"]
    if not case["ddof1_eps1e-6"]["zero_std"]:
        mean_only = case["mean_only_dr_grpo_or_glm45"]
        assert_equals(group_advantages(rewards, normalise="mean"), mean_only)


@pytest.mark.parametrize("case", case_ids("group_padding"))
def test_a_group_is_repaired_before_its_statistics_are_taken(case):
    padded = repair_group(case["valid_indices"], group_size=case["group_size"])
    assert padded == (None if case["padded_indices"] is None else tuple(case["padded_indices"]))
    if padded is not None and "advantages_after_padding_ddof1" in case:
        rewards = [float(case["rewards"][i]) for i in padded]
        assert_equals(group_advantages(rewards), case["advantages_after_padding_ddof1"])


@pytest.mark.parametrize("case", case_ids("staleness"))
def test_the_oldest_token_decides_and_equality_is_kept(case):
    stale = is_stale(case["versions"], current_version=case["current"], max_lag_steps=case["tau"])
    assert stale is not case["keep"]


def test_nothing_sampled_is_never_stale():
    assert not is_stale([], current_version=9, max_lag_steps=0)
