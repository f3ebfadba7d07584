"""How far sampling runs ahead, and which groups a step takes."""

from dataclasses import replace

import pytest

from longarc.orchestrator.inflight import (
    InflightGroup,
    Member,
    choose,
    new_admissions,
    next_attempt,
)
from longarc.orchestrator.lag import can_wait, inflight_capacity
from stage_fakes import FakeFamily, loop_config, trajectory

TASK = next(FakeFamily().tasks("train", cursor=0))


@pytest.mark.parametrize(
    ("settings", "capacity"),
    [
        # PITFALLS S1: eta 2, batch 4 gives 12, whatever the version a run is resumed at.
        ({"groups_per_step": 4, "max_lag_steps": 2}, 12),
        ({"groups_per_step": 4, "max_lag_steps": 0}, 4),
        ({"groups_per_step": 4, "max_lag_steps": 3, "push_every_steps": 2}, 12),
        ({"groups_per_step": 4, "max_lag_steps": 1, "push_every_steps": 2}, 4),
        ({"groups_per_step": 4, "max_lag_steps": 2, "max_inflight_groups": 6}, 6),
        # Ready order keeps half of the steps for stragglers.
        ({"groups_per_step": 4, "max_lag_steps": 0, "consume": "ready"}, 4),
        ({"groups_per_step": 4, "max_lag_steps": 1, "consume": "ready"}, 8),
        ({"groups_per_step": 4, "max_lag_steps": 4, "consume": "ready"}, 12),
    ],
)
def test_the_groups_in_flight_follow_from_the_lag_that_is_allowed(settings, capacity):
    assert inflight_capacity(loop_config(**settings)) == capacity


@pytest.mark.parametrize(
    ("last_versions", "fits"),
    [([], True), ([5], True), ([4], False), ([5, 5], True), ([5, 5, 5], False), ([6, 5, 5], True)],
)
def test_groups_left_out_must_all_fit_into_the_steps_before_they_expire(last_versions, fits):
    assert can_wait(last_versions, version=4, groups_per_step=2) is fits


def group(index: int, *, oldest: int | None, is_complete: bool) -> InflightGroup:
    """A group of one whose tokens, or whose running rollout, are of version ``oldest``."""
    (admission,) = new_admissions(
        TASK, stage="rl", group_index=index, group_size=1, policy_version=0, run_seed=0
    )
    member = Member(admission, started_version=oldest)
    if is_complete:
        member.trajectory = trajectory(0, 1.0, versions=() if oldest is None else (oldest,))
    return InflightGroup(index, (member,))


def chosen(groups, *, consume, groups_per_step=1, trainer_version=0, max_lag_steps=2):
    found = choose(
        groups,
        consume=consume,
        groups_per_step=groups_per_step,
        trainer_version=trainer_version,
        max_lag_steps=max_lag_steps,
    )
    return None if found is None else [one.index for one in found]


def test_in_admission_order_the_oldest_group_is_waited_for():
    slow, fast = group(3, oldest=0, is_complete=False), group(4, oldest=0, is_complete=True)
    assert chosen([fast, slow], consume="admission") is None
    done = group(3, oldest=0, is_complete=True)
    assert chosen([fast, done], consume="admission", groups_per_step=2) == [3, 4]


def test_in_ready_order_a_straggler_is_overtaken_until_its_lag_runs_out():
    slow, fast = group(3, oldest=0, is_complete=False), group(4, oldest=1, is_complete=True)
    assert chosen([slow, fast], consume="ready", trainer_version=1) == [4]
    assert chosen([slow, fast], consume="ready", trainer_version=2) is None


def test_in_ready_order_the_group_that_expires_first_goes_first():
    groups = [group(0, oldest=2, is_complete=True), group(1, oldest=1, is_complete=True)]
    assert chosen(groups, consume="ready", trainer_version=2) == [1]


def test_rollouts_that_wait_their_turn_do_not_expire():
    waiting, fast = group(0, oldest=None, is_complete=False), group(1, oldest=2, is_complete=True)
    assert chosen([waiting, fast], consume="ready", trainer_version=2, max_lag_steps=0) == [1]


def test_nobody_waits_for_what_cannot_be_saved():
    expired = group(0, oldest=0, is_complete=False)
    fresh = group(1, oldest=5, is_complete=True)
    assert chosen([expired, fresh], consume="ready", trainer_version=5, max_lag_steps=1) == [1]


def test_a_step_needs_its_groups():
    assert (
        chosen([group(0, oldest=0, is_complete=True)], consume="ready", groups_per_step=2) is None
    )
    assert chosen([], consume="admission") is None


def test_members_of_a_group_have_ids_and_seeds_of_their_own():
    first, second = new_admissions(
        TASK, stage="rl", group_index=7, group_size=2, policy_version=3, run_seed=0
    )
    assert (first.trajectory_id, second.trajectory_id) == ("rl/7/0/0", "rl/7/1/0")
    assert first.group_id == second.group_id == "rl/7"
    again = next_attempt(first, policy_version=4, run_seed=0)
    assert again == replace(
        first, trajectory_id="rl/7/0/1", attempt=1, policy_version=4, seed=again.seed
    )
    other_run = new_admissions(
        TASK, stage="rl", group_index=7, group_size=1, policy_version=3, run_seed=1
    )[0]
    assert len({first.seed, second.seed, again.seed, other_run.seed}) == 4


def test_seeds_do_not_depend_on_the_process():
    (admission,) = new_admissions(
        TASK, stage="rl", group_index=7, group_size=1, policy_version=3, run_seed=0
    )
    assert admission.seed == 31922315143266189
