import sqlite3

import pytest

from ledger_cases import make_admission, make_batch, make_group, make_report, make_trajectory
from longarc.records.outcome import Disposition, Outcome
from longarc.runs.codec import compress, trajectory_body
from longarc.runs.ledger import Ledger
from longarc.runs.reader import LedgerReader


@pytest.fixture
def path(tmp_path):
    """A ledger of two steps, with one excluded and one evaluated trajectory, all well."""
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path, clock=lambda: 1.0) as ledger:
        for step in range(2):
            admissions = [make_admission(step, member) for member in range(3)]
            ledger.admit(admissions)
            members = [make_trajectory(admission) for admission in admissions[:2]]
            for trajectory in members:
                ledger.complete(trajectory)
            crashed = make_trajectory(admissions[2], reward=None, outcome=Outcome.ENV_CRASHED)
            ledger.complete(crashed)
            batch = make_batch([make_group(members, [2, 1])], step=step)
            fate = (Disposition.ENVIRONMENT_FAULT, None)
            ledger.commit_step(batch, make_report(batch), filtered={crashed.id: fate})
        evaluated = make_trajectory(make_admission(0, 0, stage="eval"))
        ledger.complete(evaluated, disposition=Disposition.EVALUATED)
        assert ledger.audit().ok
    return path


def findings_after(path, *statements):
    """Tamper with the file as somebody who avoids the triggers would, then audit."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("DROP TRIGGER one_disposition")
    connection.execute("DROP TRIGGER no_late_turn")
    for statement, *values in statements:
        assert connection.execute(statement, values).rowcount > 0
    connection.close()
    with LedgerReader.open_read_only(path) as reader:
        report = reader.audit()
    assert report.ok == (not report.findings)
    return " | ".join(report.findings)


def test_a_clean_ledger_is_counted(path):
    with LedgerReader.open_read_only(path) as reader:
        report = reader.audit()
    assert (report.num_admissions, report.num_trajectories) == (6, 7)
    assert (report.num_uses, report.num_steps, report.findings) == (4, 2, ())


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        (
            "DELETE FROM uses WHERE trajectory_id = 'rl/0/0/0'",
            "rl/0/0/0 is trained, but no step used it",
        ),
        (
            "DELETE FROM uses WHERE trajectory_id = 'rl/0/0/0'",
            "batch of step 0, rebuilt, has digest",
        ),
        ("UPDATE uses SET multiplicity = 9 WHERE trajectory_id = 'rl/0/1/0'", "batch of step 0"),
        (
            "UPDATE trajectories SET disposition = 'stale' WHERE id = 'rl/1/0/0'",
            "step 1 of stage rl used trajectory rl/1/0/0, whose disposition is stale",
        ),
        (
            "UPDATE trajectories SET disposition = NULL WHERE id = 'eval/0/0/0'",
            "eval/0/0/0 has no disposition",
        ),
        (
            "UPDATE trajectories SET disposition = 'trained' WHERE id = 'rl/0/2/0'",
            "rl/0/2/0 is trained, but ended as env_crashed",
        ),
        (
            "UPDATE trajectories SET disposition = 'stale' WHERE id = 'eval/0/0/0'",
            "eval/0/0/0 is stale, but was never admitted",
        ),
        ("DELETE FROM trajectories WHERE id = 'rl/0/2/0'", "admission rl/0/2/0 has not ended"),
        ("DELETE FROM trajectories WHERE id = 'rl/0/2/0'", "belongs to no trajectory"),
        ("DELETE FROM trajectories WHERE id = 'rl/0/0/0'", "row of trajectories that is not there"),
        ("DELETE FROM trajectories WHERE id = 'rl/0/0/0'", "cannot be rebuilt"),
        ("DELETE FROM payloads WHERE sequence = 1", "rl/0/0/0 has no payload"),
        ("UPDATE payloads SET payload = x'00' WHERE sequence = 1", "rl/0/0/0: a stored blob"),
        (
            "UPDATE trajectories SET reward = 0.0 WHERE id = 'rl/0/0/0'",
            "rl/0/0/0: reward is 0.0 in the row and 1.0 in the payload",
        ),
        (
            "UPDATE trajectories SET newest_version = 7 WHERE id = 'rl/0/0/0'",
            "which version 7 sampled",
        ),
        ("UPDATE steps SET step = 5 WHERE step = 1", "step 5 stands where step 1 should"),
        ("UPDATE steps SET trainer_version = 4 WHERE step = 1", "started from version 4"),
        (
            "UPDATE steps SET policy_version = -1 WHERE step = 1",
            "went back from version 1 to version -1",
        ),
        ("UPDATE steps SET batch_sha256 = 'no' WHERE step = 1", "recorded is no"),
        ("UPDATE steps SET resets_optimizer = 0 WHERE step = 1", "batch of step 1"),
        ("INSERT INTO turns VALUES ('rl/0/0/0', 0, x'00')", "its turn log was not folded"),
    ],
)
def test_tampering_is_found(path, statement, finding):
    assert finding in findings_after(path, (statement,))


def test_a_payload_replaced_by_another_valid_one_is_found(path):
    other = compress(trajectory_body(make_trajectory(make_admission(0, 0), version=1)))
    found = findings_after(path, ("UPDATE payloads SET payload = ? WHERE sequence = 1", other))
    assert "rl/0/0/0: the payload has changed" in found
    assert "batch of step 0" in found


def test_two_dispositions_are_impossible(path):
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="has one disposition"):
        connection.execute("UPDATE trajectories SET disposition = 'stale' WHERE id = 'rl/0/0/0'")
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        connection.execute(
            "INSERT INTO trajectories(id, stage, group_id, task_id, family, outcome, num_turns, "
            "num_segments, num_tokens, num_sampled_tokens, num_trained_tokens, difficulty, "
            "started_at_s, duration_s, completed_at_s, sha256) VALUES "
            "('rl/0/0/0', '', '', '', '', '', 0, 0, 0, 0, 0, 0, 0, 0, 0, '')"
        )
    connection.close()


def test_a_use_cannot_be_counted_less_than_once(path):
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        connection.execute("UPDATE uses SET multiplicity = 0")
    connection.close()


def test_a_damaged_page_does_not_pass(path):
    connection = sqlite3.connect(path)
    [payload] = connection.execute("SELECT payload FROM payloads WHERE sequence = 1").fetchone()
    [page_size] = connection.execute("PRAGMA page_size").fetchone()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(path.read_bytes())
    start = data.index(payload) // page_size * page_size
    # The pointer to the page's first cell leads nowhere.
    data[start + 8 : start + 10] = b"\xff\xff"
    path.write_bytes(bytes(data))
    with LedgerReader.open_read_only(path) as reader:
        assert any("damaged" in finding for finding in reader.audit().findings)


def test_a_thoroughly_damaged_ledger_is_not_listed_without_end(tmp_path):
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        ledger.admit([make_admission(index, 0) for index in range(150)])
        report = ledger.audit()
    assert len(report.findings) == 101
    assert "more than 100" in report.findings[-1]
