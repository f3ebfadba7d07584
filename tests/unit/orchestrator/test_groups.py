"""What of a complete group is trained, and what becomes of the rest (PITFALLS G1 to G5)."""

import pytest

from longarc.orchestrator.groups import sampled_versions, settle
from longarc.records.outcome import Disposition, Outcome
from longarc.records.trajectory import Trajectory
from stage_fakes import trajectory

FAULT = (Disposition.ENVIRONMENT_FAULT, "sandbox_lost")


def lost(index: int) -> Trajectory:
    return trajectory(index, None, outcome=Outcome.SANDBOX_LOST)


def settled(members, *, dynamic_sampling=True, trainer_version=5, max_lag_steps=0, **window):
    return settle(
        members,
        dynamic_sampling=dynamic_sampling,
        trainer_version=trainer_version,
        max_lag_steps=max_lag_steps,
        **window,
    )


def test_a_whole_group_is_trained_as_it_is():
    members = [trajectory(0, 1.0), trajectory(1, 0.0)]
    result = settled(members)
    assert result.group.trajectories == tuple(members)
    assert result.group.multiplicities == (1, 1)
    assert (result.group.id, result.group.task_id, result.group.family) == (
        "rl/0",
        "task",
        "family",
    )
    assert result.fates == {}


def test_one_lost_sandbox_does_not_cost_the_group_and_is_no_reward_of_zero():
    members = [trajectory(0, 1.0), lost(1), trajectory(2, 0.0), trajectory(3, 0.0)]
    result = settled(members)
    assert [t.id for t in result.group.trajectories] == ["rl/0/0/0", "rl/0/2/0", "rl/0/3/0"]
    # Repeated round-robin: the first valid member stands in for the one that was lost.
    assert result.group.multiplicities == (2, 1, 1)
    assert result.fates == {"rl/0/1/0": FAULT}


def test_exactly_half_is_dropped():
    members = [trajectory(0, 1.0), lost(1), trajectory(2, 0.0), lost(3)]
    result = settled(members)
    assert result.group is None
    dropped = (Disposition.GROUP_DROPPED, "2 of 4 members valid")
    assert result.fates == {
        "rl/0/0/0": dropped,
        "rl/0/1/0": FAULT,
        "rl/0/2/0": dropped,
        "rl/0/3/0": FAULT,
    }


def test_a_time_out_of_the_policy_counts_like_any_other_failure():
    members = [trajectory(0, 1.0), trajectory(1, 0.0, outcome=Outcome.TIMED_OUT)]
    assert settled(members).group.trajectories == tuple(members)


def test_rewards_that_are_all_alike_are_filtered_only_under_dynamic_sampling():
    members = [trajectory(0, 1.0), trajectory(1, 1.0)]
    result = settled(members)
    assert result.group is None
    assert set(result.fates.values()) == {(Disposition.ZERO_VARIANCE, None)}
    assert settled(members, dynamic_sampling=False).group.trajectories == tuple(members)


def test_a_lost_member_s_missing_reward_is_not_a_difference():
    members = [trajectory(0, 1.0), trajectory(1, 1.0), lost(2)]
    assert settled(members).fates["rl/0/0/0"] == (Disposition.ZERO_VARIANCE, None)


def test_the_oldest_token_decides_and_equality_is_kept():
    members = [trajectory(0, 1.0, versions=(3, 9)), trajectory(1, 0.0, versions=(9, 9))]
    assert settled(members, trainer_version=9, max_lag_steps=6).fates == {}
    result = settled(members, trainer_version=9, max_lag_steps=5)
    assert result.group is None, "one of two is not more than half"
    assert result.fates["rl/0/0/0"] == (Disposition.STALE, "lag 6 > 5")


def test_a_stale_member_of_a_larger_group_is_repaired_like_a_lost_one():
    members = [trajectory(0, 1.0, versions=(1,)), trajectory(1, 0.0), trajectory(2, 1.0)]
    result = settled(members)
    assert result.group.multiplicities == (2, 1)
    assert result.fates == {"rl/0/0/0": (Disposition.STALE, "lag 4 > 0")}


def test_a_cancelled_member_counts_as_lost():
    members = [
        trajectory(0, 1.0),
        trajectory(1, 0.0),
        trajectory(2, None, outcome=Outcome.CANCELLED_STALE),
    ]
    result = settled(members)
    assert result.fates == {"rl/0/2/0": (Disposition.CANCELLED, "cancelled_stale")}


def test_a_group_of_one_is_trained_or_dropped():
    assert settled([trajectory(0, 1.0)], dynamic_sampling=False).group.multiplicities == (1,)
    assert settled([lost(0)], dynamic_sampling=False).group is None


def test_a_group_without_one_token_to_train_is_dropped():
    members = [trajectory(index, float(index), is_trained=False) for index in range(2)]
    result = settled(members)
    assert set(result.fates.values()) == {(Disposition.GROUP_DROPPED, "no token to train")}


@pytest.mark.parametrize("num_lost", range(9))
def test_every_member_is_either_trained_or_has_a_fate(num_lost):
    members = [lost(i) if i < num_lost else trajectory(i, float(i % 2)) for i in range(8)]
    result = settled(members)
    trained = [t.id for t in result.group.trajectories] if result.group else []
    assert sorted([*trained, *result.fates]) == [member.id for member in members]
    if result.group:
        assert sum(result.group.multiplicities) == 8


def test_sampled_versions_leave_out_prompts():
    assert sampled_versions(trajectory(0, 1.0, versions=(2, 4))) == {2, 4}


def test_groups_that_are_too_easy_or_too_hard_are_replaced_and_their_fate_says_why():
    members = [trajectory(0, 1.0), trajectory(1, 0.0), trajectory(2, 0.0), lost(3)]
    assert settled(members, min_mean_reward=0.3, max_mean_reward=0.4).group is not None
    reason = "difficulty: mean reward 0.333333 is not from 0.5 to inf"
    result = settled(members, min_mean_reward=0.5)
    assert result.group is None
    assert result.fates["rl/0/0/0"] == (Disposition.FILTERED, reason)
    assert result.fates["rl/0/3/0"] == FAULT
    assert settled(members, max_mean_reward=0.3).group is None
    alike = [trajectory(0, 1.0), trajectory(1, 1.0)]
    too_easy = settled(alike, dynamic_sampling=False, max_mean_reward=0.9)
    assert too_easy.fates["rl/0/0/0"][0] is Disposition.FILTERED


def test_a_group_whose_rewards_nobody_gave_has_no_difficulty():
    members = [trajectory(0, None), trajectory(1, None)]
    assert settled(members, dynamic_sampling=False, min_mean_reward=0.5).group is not None
