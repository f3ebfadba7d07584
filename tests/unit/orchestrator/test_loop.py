"""The loop: order, pushes, stops, stragglers, drops, stalls and what is reported."""

import asyncio

import pytest

from longarc.errors import ConfigError, ContractError, EngineError, StalledError
from longarc.orchestrator.mixture import FamilyShare
from longarc.orchestrator.recovery import recover
from longarc.records.outcome import Disposition, Outcome
from longarc.runs.ledger import Ledger
from stage_fakes import (
    STAGE,
    FakeFamily,
    FakeTrainer,
    Play,
    Stage,
    group_indices,
    lags,
    loop_config,
    quick_directory,
)
from virtual_time import run_virtual


@pytest.fixture
def path():
    with quick_directory() as directory:
        yield directory / "ledger.sqlite"


def stopping_after(stage: Stage, seconds: float):
    async def main():
        asyncio.get_running_loop().call_later(seconds, stage.stop.set)
        return await stage.run()

    return run_virtual(main())


def counts(path, by):
    with Ledger.open(path) as ledger:
        assert ledger.audit().findings == ()
        return ledger.counts(by, stage=STAGE)


def uneven(task_index: int, rollout: int) -> Play:
    return Play(seconds=float((7 * task_index + 3 * rollout) % 5), reward=float(rollout % 2))


def test_without_lag_sampling_and_training_take_turns_in_admission_order(path):
    stage = Stage(path, loop_config(num_steps=4), FakeFamily(how=uneven))
    run_virtual(stage.run())
    assert group_indices(stage.trainer.batches) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert set(lags(stage.trainer.batches)) == {0}
    assert stage.engine.pushed == [0, 1, 2, 3]


def test_without_lag_dropped_groups_are_replaced_and_the_order_stays(path):
    def how(task_index: int, rollout: int) -> Play:
        play = uneven(task_index, rollout)
        return Play(play.seconds, 0.0) if task_index % 3 == 1 else play

    runs = []
    for attempt in range(2):
        stage = Stage(path.with_name(f"{attempt}"), loop_config(num_steps=3), FakeFamily(how=how))
        run_virtual(stage.run())
        runs.append(group_indices(stage.trainer.batches))
    assert runs[0] == runs[1] == [[0, 2], [3, 5], [6, 8]]


def test_a_step_takes_fewer_groups_once_the_bound_on_sampling_is_reached(path):
    def how(task_index: int, rollout: int) -> Play:
        play = uneven(task_index, rollout)
        is_dropped = task_index in (0, 1, 2, 5, 6, 7, 8, 9, 10)
        return Play(play.seconds, 0.0) if is_dropped else play

    config = loop_config(num_steps=4, max_sampled_groups_per_step=4)
    stage = Stage(path, config, FakeFamily(how=how))
    run_virtual(stage.run())
    # Of 0 to 3 one is left, of 4 to 7 one, of 8 to 11 one; after that nothing is dropped.
    assert group_indices(stage.trainer.batches) == [[3], [4], [11], [12, 13]]
    assert set(lags(stage.trainer.batches)) == {0}
    assert counts(path, "disposition") == {"trained": 10, "zero_variance": 18}


def test_one_group_is_waited_for_however_many_are_dropped(path):
    def how(task_index: int, rollout: int) -> Play:
        return Play(1.0, float(rollout % 2) if task_index == 9 else 0.0)

    config = loop_config(num_steps=1, max_sampled_groups_per_step=2)
    stage = Stage(path, config, FakeFamily(how=how))
    run_virtual(stage.run())
    assert group_indices(stage.trainer.batches) == [[9]]


def test_weights_are_pushed_every_k_steps_and_the_optimizer_is_reset_after_pushes_only(path):
    config = loop_config(
        num_steps=6, max_lag_steps=2, push_every_steps=2, reset_optimizer_on_push=True
    )
    stage = Stage(path, config)
    run_virtual(stage.run())
    assert stage.engine.pushed == [0, 2, 4]
    resets = [batch.resets_optimizer for batch in stage.trainer.batches]
    assert resets == [False, False, True, False, True, False]


def test_weights_that_stay_as_they_are_are_pushed_once_and_never_get_old(path):
    stage = Stage(path, loop_config(num_steps=5, max_lag_steps=2))
    stage.trainer.keeps_policy = True
    result = run_virtual(stage.run())
    assert (result.num_steps, result.policy_version, result.is_complete) == (5, 0, True)
    assert stage.engine.pushed == [0]
    assert set(lags(stage.trainer.batches)) == {0}
    with Ledger.open(path) as ledger:
        assert ledger.audit().findings == ()


def test_no_reset_unless_asked_for(path):
    stage = Stage(path, loop_config())
    run_virtual(stage.run())
    assert not any(batch.resets_optimizer for batch in stage.trainer.batches)


def test_a_resumed_stage_resets_like_an_uninterrupted_one(path):
    config = loop_config(num_steps=3, reset_optimizer_on_push=True)
    first = Stage(path, config)
    first.trainer.fails_at_step = 1
    with pytest.raises(ValueError, match="the trainer broke"):
        run_virtual(first.run())
    second = Stage(path, config)
    run_virtual(second.run())
    batches = first.trainer.batches + second.trainer.batches
    assert [batch.resets_optimizer for batch in batches] == [False, True, True]


def test_sampling_goes_on_while_the_trainer_trains(path):
    slow_trainer = {"step_s": 10.0}
    turns = Stage(path, loop_config(num_steps=4), FakeFamily(how=_ten_seconds), **slow_trainer)
    ahead = Stage(
        path.with_name("ahead"),
        loop_config(num_steps=4, max_lag_steps=1),
        FakeFamily(how=_ten_seconds),
        **slow_trainer,
    )
    assert _duration(turns) == 80.0
    assert _duration(ahead) == 50.0


def _ten_seconds(task_index: int, rollout: int) -> Play:
    return Play(seconds=10.0, reward=float(rollout % 2))


def _duration(stage: Stage) -> float:
    async def main():
        await stage.run()
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_slow_tasks_are_trained_as_often_as_they_are_drawn(path):
    # PITFALLS S3: every third task takes as long as ten steps; dropping what is late would starve it.
    def how(task_index: int, rollout: int) -> Play:
        return Play(seconds=30.0 if task_index % 3 == 0 else 1.0, reward=float(rollout % 2))

    config = loop_config(num_steps=9, groups_per_step=1, max_lag_steps=3, consume="ready")
    stage = Stage(path, config, FakeFamily(how=how), step_s=3.0)
    run_virtual(stage.run())
    order = [index for (index,) in group_indices(stage.trainer.batches)]
    assert order != sorted(order), "nobody was overtaken: the test shows nothing"
    assert sorted(order) == list(range(9))
    assert max(lags(stage.trainer.batches)) <= 3


def test_at_most_so_many_rollouts_run_at_once_the_oldest_first(path):
    running, most, order = 0, 0, []

    class Counting(FakeFamily):
        def open(self, task, *, sandboxes, seed):
            env = super().open(task, sandboxes=sandboxes, seed=seed)
            run = env.run

            async def counted(policy):
                nonlocal running, most
                running += 1
                most = max(most, running)
                order.append(task.id)
                result = await run(policy)
                running -= 1
                return result

            env.run = counted
            return env

    config = loop_config(max_lag_steps=1, max_concurrent_rollouts=3)
    run_virtual(Stage(path, config, Counting()).run())
    assert most == 3
    assert order == sorted(order)


def test_a_repaired_group_is_trained_and_its_lost_member_has_its_own_fate(path):
    def how(task_index: int, rollout: int) -> Play:
        outcome = Outcome.SANDBOX_LOST if rollout == 1 else Outcome.COMPLETED
        return Play(reward=float(rollout % 2 or rollout == 2), outcome=outcome)

    stage = Stage(
        path, loop_config(num_steps=1, groups_per_step=1, group_size=3), FakeFamily(how=how)
    )
    run_virtual(stage.run())
    (group,) = stage.trainer.batches[0].groups
    assert group.multiplicities == (2, 1)
    assert counts(path, "disposition") == {
        Disposition.TRAINED: 2,
        Disposition.ENVIRONMENT_FAULT: 1,
    }


def test_groups_of_one_are_trained(path):
    config = loop_config(group_size=1, dynamic_sampling=False)
    stage = Stage(path, config)
    assert run_virtual(stage.run()).is_complete


def test_a_stop_ends_the_stage_between_steps_and_it_can_be_continued(path):
    config = loop_config(num_steps=5, max_lag_steps=1)
    first = Stage(path, config, FakeFamily(how=_ten_seconds), step_s=4.0)
    result = stopping_after(first, 15.0)
    assert not result.is_complete
    assert result.num_steps == len(first.trainer.batches)
    with Ledger.open(path) as ledger:
        assert ledger.open_admissions(STAGE) == []
        outcomes = ledger.counts("outcome", stage=STAGE)
    assert outcomes[Outcome.CANCELLED_SHUTDOWN] > 0
    assert all(session.is_closed for session in first.sessions.opened.values())

    second = Stage(path, config, FakeFamily(how=_ten_seconds), step_s=4.0)
    assert run_virtual(second.run()).is_complete
    batches = first.trainer.batches + second.trainer.batches
    assert group_indices(batches) == [[2 * step, 2 * step + 1] for step in range(5)]
    assert Disposition.GROUP_DROPPED not in counts(path, "disposition")


def test_a_stop_during_a_step_lets_the_step_finish(path):
    stage = Stage(path, loop_config(num_steps=5), step_s=100.0)
    result = stopping_after(stage, 50.0)
    assert (result.num_steps, result.policy_version) == (1, 1)
    assert [report.step for report in stage.reports] == [0]


def test_a_stop_before_anything_happened_is_clean(path):
    stage = Stage(path, loop_config(), FakeFamily(how=_ten_seconds), push_s=5.0)
    result = stopping_after(stage, 1.0)
    assert (result.num_steps, result.is_complete) == (0, False)
    assert run_virtual(Stage(path, loop_config()).run()).is_complete


def test_less_lag_after_a_resume_drops_what_is_too_old_by_then(path):
    def how(task_index: int, rollout: int) -> Play:
        return Play(seconds=20.0 if task_index >= 4 else 1.0, reward=float(rollout % 2))

    first = Stage(path, loop_config(num_steps=8, max_lag_steps=3), FakeFamily(how=how))
    first.trainer.fails_at_step = 3
    with pytest.raises(ValueError, match="the trainer broke"):
        run_virtual(first.run())
    second = Stage(path, loop_config(num_steps=8, max_lag_steps=0), FakeFamily(how=how))
    assert run_virtual(second.run()).is_complete
    assert set(lags(second.trainer.batches)) == {0}
    assert counts(path, "disposition")[Disposition.STALE] > 0


def test_a_rollout_that_got_too_old_is_run_again_once(path):
    # Four groups run when a process ends; the next one allows no lag, so that three of them are too old
    # as soon as the first was trained, and two of those again after the second.
    first = Stage(path, loop_config(num_steps=9, groups_per_step=1, max_lag_steps=3))
    first.family.how = lambda task_index, rollout: Play(seconds=100.0)
    stopping_after(first, 5.0)

    def how(task_index: int, rollout: int) -> Play:
        return Play(seconds=1.0 + 10.0 * task_index, reward=float(rollout % 2))

    second = Stage(
        path, loop_config(num_steps=3, groups_per_step=1, max_lag_steps=0), FakeFamily(how=how)
    )
    assert run_virtual(second.run()).is_complete
    assert group_indices(second.trainer.batches) == [[0], [1], [4]]
    assert set(lags(second.trainer.batches)) == {0}
    with Ledger.open(path) as ledger:
        ended = {row.id.split("/", 1)[1]: row.outcome for row in ledger.rows(stage=STAGE)}
    stale = sorted(key for key, outcome in ended.items() if outcome is Outcome.CANCELLED_STALE)
    # group/member/attempt: attempt 0 was stopped, 1 and 2 got too old, and there is no attempt 3.
    assert stale == sorted(
        f"{group}/{member}/{attempt}"
        for group, attempts in ((1, [1]), (2, [1, 2]), (3, [1, 2]))
        for member in (0, 1)
        for attempt in attempts
    )
    assert counts(path, "disposition")[Disposition.CANCELLED] == 8 + len(stale)


def test_a_second_attempt_of_a_stale_rollout_is_not_repeated_by_a_resume(path):
    durations = {0: 1.0, 1: 1e3}

    def how(task_index: int, rollout: int) -> Play:
        return Play(seconds=durations.get(task_index, 50.0), reward=float(rollout % 2))

    first = Stage(
        path,
        loop_config(
            num_steps=9, groups_per_step=1, max_lag_steps=1, rollout_timeout_s=5e3, watchdog_s=1e4
        ),
        FakeFamily(how=lambda task_index, rollout: Play(seconds=100.0)),
    )
    stopping_after(first, 5.0)
    strict = loop_config(
        num_steps=3, groups_per_step=1, max_lag_steps=0, rollout_timeout_s=5e3, watchdog_s=1e4
    )
    # Group 1 is too old after the step of group 0 and starts again; then the process ends.
    stopping_after(Stage(path, strict, FakeFamily(how=how)), 20.0)
    with Ledger.open(path) as ledger:
        stale = ledger.rows(stage=STAGE, outcome=Outcome.CANCELLED_STALE)
    assert {row.id for row in stale} == {f"{STAGE}/1/0/1", f"{STAGE}/1/1/1"}
    with Ledger.open(path) as ledger:
        version = len(ledger.steps(STAGE))
        (group,) = recover(ledger, STAGE, policy_version=version, run_seed=0).groups
    assert [member.was_stale for member in group.members] == [True, True]


def test_tasks_of_a_family_that_is_gone_are_named(path):
    first = Stage(path, loop_config(), FakeFamily("old"))
    first.trainer.fails_at_step = 0
    with pytest.raises(ValueError, match="the trainer broke"):
        run_virtual(first.run())
    with Ledger.open(path) as ledger:
        ledger.admit(
            [
                a.__class__(
                    **{**_fields(a), "group_index": 99, "group_id": "g", "trajectory_id": "x"}
                )
                for a in ledger.admissions(STAGE)[:1]
            ]
        )
    second = Stage(path, loop_config(), FakeFamily("new"))
    with pytest.raises(ConfigError, match=r"task family 'old', but the stage has \['new'\]"):
        run_virtual(second.run())


def _fields(record):
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_a_stage_in_which_nothing_can_be_trained_ends_with_the_reason(path):
    def how(task_index: int, rollout: int) -> Play:
        return Play(error=FileNotFoundError("/data/answers.json"))

    stage = Stage(path, loop_config(max_dropped_groups_per_step=5), FakeFamily(how=how))
    with pytest.raises(StalledError, match=r"6 groups were dropped .*/answers\.json") as raised:
        run_virtual(stage.run())
    assert "12 environment_fault" in str(raised.value)
    assert "raise stages.agentic_rl.loop.max_dropped_groups_per_step." in str(raised.value)


def test_a_trainer_that_hangs_is_named(path):
    class Hanging(FakeTrainer):
        async def step(self, batch):
            await asyncio.sleep(1e9)

    stage = Stage(path, loop_config(rollout_timeout_s=5, grader_timeout_s=5, watchdog_s=11))
    stage.trainer = Hanging()
    with pytest.raises(
        StalledError,
        match=r"nothing has moved for 11 s\. .*waits for trainer\.step\(0\).*raise stages\.agentic_rl\.loop\.watchdog_s\.",
    ):
        run_virtual(stage.run())


def test_a_hand_over_of_weights_that_hangs_is_named(path):
    stage = Stage(
        path, loop_config(rollout_timeout_s=5, grader_timeout_s=5, watchdog_s=11), push_s=1e9
    )
    with pytest.raises(StalledError, match=r"engine\.update_weights\(policy_version=0\)"):
        run_virtual(stage.run())


def test_a_rollout_that_hangs_against_its_deadline_is_named(path):
    class Stubborn(FakeFamily):
        def open(self, task, *, sandboxes, seed):
            env = super().open(task, sandboxes=sandboxes, seed=seed)

            async def run(policy):
                for _ in range(3):  # swallows the deadline
                    try:
                        await asyncio.sleep(100)
                    except asyncio.CancelledError:
                        continue
                raise AssertionError

            env.run = run
            return env

    stage = Stage(
        path, loop_config(rollout_timeout_s=5, grader_timeout_s=5, watchdog_s=11), Stubborn()
    )
    with pytest.raises(StalledError, match=r"agentic_rl/0/0/0 on task 'fake/train/0' \(11 s\)"):
        run_virtual(stage.run())


def test_a_long_rollout_that_still_samples_is_no_stall(path):
    def how(task_index: int, rollout: int) -> Play:
        return Play(seconds=50.0, reward=float(rollout % 2), num_turns=10)

    config = loop_config(num_steps=1, rollout_timeout_s=5, grader_timeout_s=5, watchdog_s=11)
    stage = Stage(path, config.model_copy(update={"rollout_timeout_s": 60.0}), FakeFamily(how=how))
    assert run_virtual(stage.run()).is_complete


def test_a_trainer_that_skips_versions_is_refused(path):
    stage = Stage(path, loop_config())
    step = stage.trainer.step

    async def skipping(batch):
        stage.trainer.version += 1
        return await step(batch)

    stage.trainer.step = skipping
    with pytest.raises(ContractError, match="with step 0, version 2"):
        run_virtual(stage.run())


def test_families_get_their_shares_of_the_groups(path):
    families = [
        FamilyShare(family=FakeFamily("a"), share=3.0),
        FamilyShare(family=FakeFamily("b"), share=1.0),
    ]
    stage = Stage(path, loop_config(num_steps=4), families=families)
    run_virtual(stage.run())
    trained = [group.family for batch in stage.trainer.batches for group in batch.groups]
    assert (trained.count("a"), trained.count("b")) == (6, 2)


def test_each_step_is_reported_to_the_sinks(path):
    def how(task_index: int, rollout: int) -> Play:
        if task_index == 1:
            return Play(reward=0.0)
        return Play(seconds=3.0, reward=float(rollout % 2), num_turns=2)

    stage = Stage(path, loop_config(num_steps=2), FakeFamily(how=how), step_s=1.0)
    run_virtual(stage.run())
    first, second = stage.sink.values
    assert first["reward/mean"] == pytest.approx(2 / 6)
    assert first["success/fake"] == pytest.approx(2 / 6)
    assert first["outcome/completed"] == 6
    assert first["excluded/zero_variance"] == 2
    assert first["loop/group_survival_frac"] == pytest.approx(2 / 3)
    assert first["lag/max_steps"] == 0
    assert first["throughput/trained_tokens_per_s"] == pytest.approx(
        stage.reports[0].num_trained_tokens / first["loop/step_s"]
    )
    assert second["loop/step_s"] == pytest.approx(4.0)
    assert second["loop/trainer_idle_frac"] == pytest.approx(0.75)
    assert second["throughput/rollouts_per_s"] == pytest.approx(1.0)
    assert second["throughput/sampled_tokens_per_s"] == pytest.approx(16 / 4)
    assert "excluded/zero_variance" not in second


def test_progress_is_told_and_an_engine_that_does_not_answer_costs_only_its_metrics(path):
    class Told:
        def __init__(self):
            self.steps = []

        def update(self, *, stage, step, num_steps, metrics):
            self.steps.append((stage, step, num_steps))

    stage = Stage(path, loop_config(num_steps=2))
    stage.progress = Told()

    async def health():
        raise EngineError("no answer")

    stage.engine.health = health
    assert run_virtual(stage.run()).is_complete
    assert stage.progress.steps == [(STAGE, 1, 2), (STAGE, 2, 2)]
    assert "throughput/sampled_tokens_per_s" not in stage.sink.values[-1]


def test_a_stage_that_is_continued_after_its_end_does_not_train_half_of_a_group(path):
    def how(task_index: int, rollout: int) -> Play:
        slow = task_index == 1 and rollout == 1
        return Play(seconds=100.0 if slow else 1.0, reward=float(rollout % 2))

    first = Stage(
        path, loop_config(num_steps=9, groups_per_step=1, max_lag_steps=1), FakeFamily(how=how)
    )
    stopping_after(first, 5.0)
    # The shorter stage is over at once: one member of group 1 is cancelled, finished or not.
    run_virtual(Stage(path, loop_config(num_steps=1, groups_per_step=1)).run())
    last = Stage(path, loop_config(num_steps=3, groups_per_step=1))
    assert run_virtual(last.run()).is_complete
    trained = [g for batch in last.trainer.batches for g in batch.groups]
    assert all(sum(group.multiplicities) == 2 for group in trained)
    assert counts(path, "outcome")[Outcome.CANCELLED_SHUTDOWN] >= 1
