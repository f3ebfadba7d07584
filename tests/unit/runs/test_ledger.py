import dataclasses
import math
import threading

import pytest

from ledger_cases import make_admission, make_batch, make_group, make_report, make_trajectory
from longarc.errors import ContractError, LedgerError
from longarc.records.outcome import Disposition, Outcome
from longarc.runs.ledger import Ledger
from longarc.runs.reader import LedgerReader


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite", clock=lambda: 1_700_000_100.0) as opened:
        yield opened


def admit_and_complete(ledger, admissions, **changes):
    ledger.admit(admissions)
    trajectories = [make_trajectory(admission, **changes) for admission in admissions]
    for trajectory in trajectories:
        ledger.complete(trajectory)
    return trajectories


def test_a_rollout_goes_from_admission_over_completion_to_training(ledger):
    admissions = [make_admission(0, member) for member in range(2)]
    ledger.admit(admissions)
    assert ledger.open_admissions("rl") == admissions

    trajectories = [make_trajectory(admission) for admission in admissions]
    for trajectory in trajectories:
        ledger.complete(trajectory)
    assert ledger.open_admissions("rl") == []
    assert ledger.pending("rl") == trajectories

    batch = make_batch([make_group(trajectories, [1, 3])])
    ledger.commit_step(batch, make_report(batch))
    assert ledger.pending("rl") == []
    assert ledger.batch("rl", 0) == batch
    assert ledger.report("rl", 0) == make_report(batch)
    assert ledger.uses(trajectories[1].id) == [("rl", 0, 3)]
    assert ledger.audit().ok


def test_completion_folds_the_turn_log_of_its_session_and_no_other(ledger):
    for index in range(3):
        ledger.append_turn("rl/0/0/0", index, f"turn {index}".encode())
    ledger.append_turn("rl/0/1/0", 0, b"other")
    assert ledger.turns("rl/0/0/0") == [b"turn 0", b"turn 1", b"turn 2"]

    admit_and_complete(ledger, [make_admission(0, 0)])
    assert ledger.turns("rl/0/0/0") == []
    assert ledger.turns("rl/0/1/0") == [b"other"]


def test_a_turn_is_logged_once_and_never_after_completion(ledger):
    ledger.append_turn("rl/0/0/0", 0, b"x")
    with pytest.raises(LedgerError, match="has a turn 0 already"):
        ledger.append_turn("rl/0/0/0", 0, b"y")
    admit_and_complete(ledger, [make_admission(0, 0)])
    with pytest.raises(LedgerError, match="after the session was complete"):
        ledger.append_turn("rl/0/0/0", 1, b"z")


def test_a_rollout_is_admitted_once_and_a_failed_admission_admits_nothing(ledger):
    ledger.admit([make_admission(0, 0)])
    with pytest.raises(LedgerError, match="was admitted before"):
        ledger.admit([make_admission(0, 1), make_admission(0, 0)])
    assert [a.member_index for a in ledger.admissions("rl")] == [0]


def test_one_place_cannot_be_admitted_under_two_names(ledger):
    ledger.admit([make_admission(0, 0)])
    twin = dataclasses.replace(make_admission(0, 0), trajectory_id="another")
    with pytest.raises(LedgerError, match="was admitted before as 'rl/0/0/0'"):
        ledger.admit([twin])


def test_a_rollout_ends_once(ledger):
    [trajectory] = admit_and_complete(ledger, [make_admission(0, 0)])
    with pytest.raises(LedgerError, match="is complete already"):
        ledger.complete(trajectory)


def test_a_trajectory_that_contradicts_its_admission_is_refused(ledger):
    ledger.admit([make_admission(0, 0)])
    moved = dataclasses.replace(make_trajectory(make_admission(0, 0)), group_id="rl/9")
    with pytest.raises(LedgerError, match="but was admitted as"):
        ledger.complete(moved)


def test_a_reward_that_is_no_number_is_refused(ledger):
    with pytest.raises(ContractError, match="reward nan"):
        ledger.complete(make_trajectory(reward=math.nan))


def test_an_evaluated_trajectory_has_its_disposition_in_the_same_transaction(ledger):
    ledger.complete(make_trajectory(), disposition=Disposition.EVALUATED)
    assert ledger.pending("rl") == []
    assert ledger.audit().ok


def test_a_trajectory_becomes_trained_only_by_a_step(ledger):
    with pytest.raises(LedgerError, match="call commit_step"):
        ledger.complete(make_trajectory(), disposition=Disposition.TRAINED)
    ledger.complete(make_trajectory())
    with pytest.raises(LedgerError, match="call commit_step"):
        ledger.dispose({"rl/0/0/0": (Disposition.TRAINED, None)})


def test_a_filter_has_to_give_its_name(ledger):
    with pytest.raises(LedgerError, match="by what"):
        ledger.complete(make_trajectory(), disposition=Disposition.FILTERED)
    ledger.complete(make_trajectory(), disposition=Disposition.FILTERED, reason="overlong")
    assert ledger.row("rl/0/0/0").disposition_reason == "overlong"


def test_a_disposition_never_changes_and_all_or_none_are_set(ledger):
    admit_and_complete(ledger, [make_admission(0, member) for member in range(2)])
    ledger.dispose({"rl/0/0/0": (Disposition.STALE, None)})
    with pytest.raises(LedgerError, match="cannot become zero_variance: it is stale already"):
        ledger.dispose(
            {
                "rl/0/1/0": (Disposition.ZERO_VARIANCE, None),
                "rl/0/0/0": (Disposition.ZERO_VARIANCE, None),
            }
        )
    assert ledger.row("rl/0/1/0").disposition is None


def test_what_is_not_complete_cannot_be_disposed_of(ledger):
    with pytest.raises(LedgerError, match="not complete"):
        ledger.dispose({"nobody": (Disposition.STALE, None)})


def test_a_step_decides_about_filtered_trajectories_in_its_own_transaction(ledger):
    one, two = admit_and_complete(ledger, [make_admission(0, 0), make_admission(1, 0)])
    batch = make_batch([make_group([one])])
    ledger.commit_step(
        batch, make_report(batch), filtered={two.id: (Disposition.ZERO_VARIANCE, "all 1.0")}
    )
    assert ledger.row(two.id).disposition is Disposition.ZERO_VARIANCE

    again = make_batch([make_group([one])], step=1)
    with pytest.raises(LedgerError, match="cannot become"):
        ledger.commit_step(again, make_report(again), filtered={two.id: (Disposition.STALE, None)})
    assert len(ledger.steps("rl")) == 1


def test_reused_data_gets_a_use_row_for_every_step(ledger):
    [trajectory] = admit_and_complete(ledger, [make_admission(0, 0)])
    for step in range(3):
        batch = make_batch([make_group([trajectory], [step + 1])], step=step)
        ledger.commit_step(batch, make_report(batch))
    assert ledger.uses(trajectory.id) == [("rl", 0, 1), ("rl", 1, 2), ("rl", 2, 3)]
    assert ledger.lag_histogram("rl") == {0: 1, 1: 1, 2: 1}
    assert ledger.audit().ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 2}, "expects step 1 next"),
        ({"step": 0}, "expects step 1 next"),
        ({"step": 1, "trainer_version": 0}, "the step before left version 1"),
    ],
)
def test_steps_follow_each_other(ledger, change, message):
    [trajectory] = admit_and_complete(ledger, [make_admission(0, 0)])
    first = make_batch([make_group([trajectory])])
    ledger.commit_step(first, make_report(first))
    batch = make_batch([make_group([trajectory])], **change)
    with pytest.raises(LedgerError, match=message):
        ledger.commit_step(batch, make_report(batch))


def test_a_report_of_another_step_or_of_an_older_version_is_refused(ledger):
    [trajectory] = admit_and_complete(ledger, [make_admission(0, 0)])
    batch = make_batch([make_group([trajectory])], trainer_version=5)
    report = make_report(batch)
    with pytest.raises(LedgerError, match="the report 3"):
        ledger.commit_step(batch, dataclasses.replace(report, step=3))
    with pytest.raises(LedgerError, match="went back from 5 to 4"):
        ledger.commit_step(batch, dataclasses.replace(report, policy_version=4))


def test_a_step_that_uses_what_nobody_completed_leaves_nothing_behind(ledger):
    [known] = admit_and_complete(ledger, [make_admission(0, 0)])
    unknown = make_trajectory(make_admission(0, 1))
    batch = make_batch([make_group([known, unknown])])
    with pytest.raises(LedgerError, match="never completed"):
        ledger.commit_step(batch, make_report(batch))
    assert ledger.steps("rl") == []
    assert ledger.pending("rl") == [known]


def test_a_trajectory_altered_after_completion_cannot_be_trained(ledger):
    [trajectory] = admit_and_complete(ledger, [make_admission(0, 0)])
    batch = make_batch([make_group([dataclasses.replace(trajectory, reward=0.5)])])
    with pytest.raises(LedgerError, match="was altered between completion and training"):
        ledger.commit_step(batch, make_report(batch))


def test_an_excluded_trajectory_cannot_be_trained(ledger):
    [trajectory] = admit_and_complete(ledger, [make_admission(0, 0)])
    ledger.dispose({trajectory.id: (Disposition.STALE, None)})
    batch = make_batch([make_group([trajectory])])
    with pytest.raises(LedgerError, match="cannot become trained: it is stale"):
        ledger.commit_step(batch, make_report(batch))


def test_a_step_names_a_trajectory_once(ledger):
    [trajectory] = admit_and_complete(ledger, [make_admission(0, 0)])
    batch = make_batch([make_group([trajectory, trajectory])])
    with pytest.raises(LedgerError, match="twice"):
        ledger.commit_step(batch, make_report(batch))


def test_the_admission_cursor_survives_reopening(tmp_path):
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        assert ledger.num_groups_admitted("rl") == 0
        ledger.admit([make_admission(index, 0) for index in range(8)])
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        assert ledger.num_groups_admitted("rl") == 8
        assert ledger.num_groups_admitted("other") == 0
        assert ledger.admissions("rl")[7] == make_admission(7, 0)


def test_resume_gives_back_exactly_the_groups_that_were_not_trained(tmp_path):
    """Ids 0..7, stopped after training 0 and 1: 2..7 follow, each once (no length bias, no loss)."""
    admissions = [make_admission(index, 0) for index in range(8)]
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        ledger.admit(admissions)
        done = [make_trajectory(admission) for admission in admissions[:5]]
        for trajectory in done:
            ledger.complete(trajectory)
        batch = make_batch([make_group([done[0]]), make_group([done[1]])])
        ledger.commit_step(batch, make_report(batch))
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        again = [admission.group_index for admission in ledger.cancel_open("rl")]
        buffered = [trajectory.group_id for trajectory in ledger.pending("rl")]
    assert buffered == ["rl/2", "rl/3", "rl/4"]
    assert again == [5, 6, 7]


def test_a_crash_between_cancelling_and_readmitting_loses_no_place(ledger):
    ledger.admit([make_admission(0, 0), make_admission(1, 0)])
    first = ledger.cancel_open("rl")
    second = ledger.cancel_open("rl")
    assert first == second == [make_admission(0, 0), make_admission(1, 0)]

    ledger.admit([make_admission(0, 0, attempt=1)])
    assert ledger.cancel_open("rl") == [make_admission(1, 0), make_admission(0, 0, attempt=1)]
    assert ledger.audit().ok


def test_what_a_stop_cancelled_on_purpose_is_admitted_again_too(ledger):
    ledger.admit([make_admission(0, 0)])
    stopped = make_trajectory(make_admission(0, 0), reward=None, outcome=Outcome.CANCELLED_SHUTDOWN)
    ledger.complete(stopped, disposition=Disposition.CANCELLED, reason="stopped")
    assert ledger.cancel_open("rl") == [make_admission(0, 0)]


def test_what_was_too_old_is_not_admitted_again_by_recovery(ledger):
    ledger.admit([make_admission(0, 0)])
    stale = make_trajectory(make_admission(0, 0), reward=None, outcome=Outcome.CANCELLED_STALE)
    ledger.complete(stale, disposition=Disposition.CANCELLED)
    assert ledger.cancel_open("rl") == []


def test_cancelling_removes_turn_logs_and_touches_one_stage_only(ledger):
    ledger.admit([make_admission(0, 0), make_admission(0, 0, stage="other")])
    ledger.append_turn("rl/0/0/0", 0, b"x")
    ledger.cancel_open("rl")
    assert ledger.turns("rl/0/0/0") == []
    assert [a.stage for a in ledger.open_admissions("other")] == ["other"]


def test_rows_can_be_filtered_counted_and_paged(ledger):
    admit_and_complete(ledger, [make_admission(0, member) for member in range(3)])
    ledger.admit([make_admission(1, 0)])
    crashed = make_trajectory(make_admission(1, 0), reward=None, outcome=Outcome.ENV_CRASHED)
    ledger.complete(crashed, disposition=Disposition.ENVIRONMENT_FAULT)

    assert ledger.counts("outcome") == {"completed": 3, "env_crashed": 1}
    assert ledger.counts("disposition", stage="rl") == {None: 3, "environment_fault": 1}
    assert [row.id for row in ledger.rows(outcome=Outcome.ENV_CRASHED)] == ["rl/1/0/0"]
    assert [row.id for row in ledger.rows(limit=1, offset=2)] == ["rl/0/2/0"]
    assert ledger.rows(stage="nothing") == []
    assert [t.id for t in ledger.trajectories(disposition=Disposition.ENVIRONMENT_FAULT)] == [
        "rl/1/0/0"
    ]


def test_a_row_says_what_the_trajectory_says(ledger):
    trajectory = make_trajectory(version=3, num_segments=2)
    ledger.complete(trajectory)
    row = ledger.row(trajectory.id)
    assert (row.oldest_version, row.newest_version, row.num_segments) == (3, 3, 2)
    assert row.num_trained_tokens == trajectory.num_trained_tokens
    assert row.completed_at_s == 1_700_000_100.0


def test_a_missing_trajectory_or_step_is_named_with_what_there_is(ledger):
    ledger.complete(make_trajectory())
    with pytest.raises(LedgerError, match=r"no trajectory '0/0'; there are 'rl/0/0/0'"):
        ledger.trajectory("0/0")
    with pytest.raises(LedgerError, match="no step 4 of stage 'rl': it holds 0 steps"):
        ledger.batch("rl", 4)


def test_stages_come_in_the_order_they_began(tmp_path):
    times = iter(range(100))
    with Ledger.open(tmp_path / "l.sqlite", clock=lambda: float(next(times))) as ledger:
        for stage in ("sft", "agentic_rl", "eval"):
            ledger.admit([make_admission(0, 0, stage=stage)])
        assert ledger.stages() == ["sft", "agentic_rl", "eval"]


def test_an_error_text_that_is_no_utf8_is_spelt_out_in_the_row(ledger):
    trajectory = dataclasses.replace(make_trajectory(), error="no such file: \udcff")
    ledger.complete(trajectory)
    assert ledger.row(trajectory.id).error == "no such file: \\udcff"
    assert ledger.trajectory(trajectory.id) == trajectory


def test_a_reader_sees_what_a_writer_has_committed_and_cannot_write(ledger, tmp_path):
    with LedgerReader.open_read_only(tmp_path / "ledger.sqlite") as reader:
        ledger.complete(make_trajectory())
        assert [row.id for row in reader.rows()] == ["rl/0/0/0"]
        assert not reader.audit().ok
        assert not hasattr(reader, "complete")


def test_threads_share_one_ledger_without_losing_a_row(ledger):
    def work(group):
        for member in range(8):
            admission = make_admission(group, member)
            ledger.admit([admission])
            ledger.append_turn(admission.trajectory_id, 0, b"x")
            ledger.complete(make_trajectory(admission), disposition=Disposition.EVALUATED)

    threads = [threading.Thread(target=work, args=(group,)) for group in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.rows()) == 32
    assert ledger.audit().ok
