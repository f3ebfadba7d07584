"""Settings of the loop that cannot work are refused, with the fix."""

import pytest
from pydantic import ValidationError

from longarc.config.orchestrator import RolloutLoopConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"push_every_steps": 4, "max_lag_steps": 2},
            r"push_every_steps=4 .* max_lag_steps=2: .*Raise max_lag_steps to 3 or lower push_every_steps to 3",
        ),
        (
            {"groups_per_step": 64, "max_lag_steps": 1, "max_inflight_groups": 999},
            r"max_inflight_groups=999 .* at most 128 groups",
        ),
        (
            {"groups_per_step": 8, "max_sampled_groups_per_step": 7},
            r"max_sampled_groups_per_step=7 is less than groups_per_step=8.*Use 8 or more",
        ),
        (
            {"max_lag_steps": 2, "max_sampled_groups_per_step": 64},
            r"max_sampled_groups_per_step=64 needs max_lag_steps=0, but it is 2",
        ),
        (
            {"groups_per_step": 8, "max_lag_steps": 3, "max_inflight_groups": 7},
            r"max_inflight_groups=7 is less than groups_per_step=8.*Use 8 to 32",
        ),
        (
            {"group_size": 1},
            r"dynamic_sampling=True .* group_size=1.*set dynamic_sampling=False",
        ),
        (
            {"group_size": 1, "dynamic_sampling": False, "min_mean_reward": 0.1},
            r"min_mean_reward=0.1, max_mean_reward=None .*which group_size=1 does not have",
        ),
        (
            {"min_mean_reward": 0.9, "max_mean_reward": 0.1},
            r"min_mean_reward=0.9 is not below max_mean_reward=0.1",
        ),
        (
            {"rollout_timeout_s": 1200, "grader_timeout_s": 60},
            r"watchdog_s=900 .* is 1260\. Raise watchdog_s",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_fix(settings, message):
    with pytest.raises(ValidationError, match=message):
        RolloutLoopConfig(num_steps=1, **settings)


def test_the_least_lag_for_a_push_interval_is_enough():
    config = RolloutLoopConfig(num_steps=1, push_every_steps=3, max_lag_steps=2, groups_per_step=8)
    assert config.inflight_bound == 8


def test_an_unknown_key_is_an_error():
    with pytest.raises(ValidationError, match="max_lag"):
        RolloutLoopConfig(num_steps=1, max_lag=2)


def test_every_option_is_documented():
    fields = RolloutLoopConfig.model_fields
    assert [name for name, field in fields.items() if not field.description] == []
