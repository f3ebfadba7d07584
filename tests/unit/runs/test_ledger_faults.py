import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ledger_cases import make_admission, make_trajectory
from longarc.errors import LedgerError, ResourceError
from longarc.records.outcome import Disposition
from longarc.runs.files import lock_holders
from longarc.runs.ledger import Ledger
from longarc.runs.reader import LedgerReader
from small_disk import file_size_limit, on_archive, on_small_disk

TESTS = Path(__file__).parent.parent.parent


def test_a_ledger_from_a_newer_version_names_both_versions_and_the_fix(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    for opening in (Ledger.open, LedgerReader.open_read_only):
        with pytest.raises(LedgerError, match=r"version 7, this LongArc reads version 1: install"):
            opening(path)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"this is a text file, and a long enough one " * 50)
    with pytest.raises(LedgerError, match="damaged or not a ledger"):
        Ledger.open(path)


def test_another_programs_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "ledger.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE photos(id)")
    connection.close()
    with pytest.raises(LedgerError, match="not a LongArc ledger"):
        Ledger.open(path)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("photos",)]
    connection.close()


def test_a_truncated_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        for index in range(20):
            ledger.complete(make_trajectory(make_admission(index, 0), length=500))
    os.truncate(path, path.stat().st_size // 2)
    for opening in (Ledger.open, LedgerReader.open_read_only):
        with pytest.raises(LedgerError, match="damaged"):
            opening(path)


def test_a_missing_ledger_is_not_created_by_a_reader(tmp_path):
    with pytest.raises(LedgerError, match="there is no ledger"):
        LedgerReader.open_read_only(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_does_not_exist_is_a_resource_error(tmp_path):
    with pytest.raises(ResourceError, match="must exist and be writable"):
        Ledger.open(tmp_path / "nowhere" / "ledger.sqlite")


def test_a_reader_of_a_ledger_without_tables_is_told_to_resume(tmp_path):
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(LedgerError, match="holds no tables"):
        LedgerReader.open_read_only(tmp_path / "ledger.sqlite")
    Ledger.open(tmp_path / "ledger.sqlite").close()
    LedgerReader.open_read_only(tmp_path / "ledger.sqlite").close()


READ_THE_ARCHIVE = """
from pathlib import Path
from longarc.runs.reader import LedgerReader

with LedgerReader.open_read_only(Path("/mnt/ledger.sqlite")) as reader:
    print(len(reader.rows()), reader.audit().ok)
"""


def test_an_archived_ledger_can_be_read_where_nothing_can_be_written(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.complete(make_trajectory(), disposition=Disposition.EVALUATED)
    done = on_archive(READ_THE_ARCHIVE, directory=tmp_path)
    if done is None:
        pytest.skip("needs a user namespace for a file system of its own")
    assert (done.stdout, done.stderr) == ("1 True\n", "")


def test_a_closed_ledger_says_so(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.complete(make_trajectory())


def test_a_second_writer_is_refused_and_told_who_holds_the_ledger(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
            "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.read()",
            str(path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with (
            Ledger.open(path, busy_timeout_s=0.01) as ledger,
            pytest.raises(LedgerError, match="locked") as caught,
        ):
            ledger.complete(make_trajectory())
        if lock_holders(path, Path(f"{path}-shm")):
            assert f"held by process {holder.pid}" in str(caught.value)
    finally:
        holder.communicate()


def test_a_full_file_leaves_nothing_half_written_and_the_ledger_usable(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        ledger.complete(make_trajectory(make_admission(0, 0)), disposition=Disposition.EVALUATED)
        big = make_trajectory(make_admission(0, 1), length=60_000)
        with (
            file_size_limit(100_000),
            pytest.raises(ResourceError, match="Nothing was half-written"),
        ):
            ledger.complete(big, disposition=Disposition.EVALUATED)
        assert [row.id for row in ledger.rows()] == ["rl/0/0/0"]
        assert ledger.audit().ok
        ledger.complete(big, disposition=Disposition.EVALUATED)
        assert ledger.audit().ok
        assert ledger.trajectory(big.id) == big


FILL_THE_DISK = """
from pathlib import Path
from ledger_cases import make_admission, make_trajectory
from longarc.errors import ResourceError
from longarc.records.outcome import Disposition
from longarc.runs.ledger import Ledger

path = Path("/mnt/ledger.sqlite")
with Ledger.open(path) as ledger:
    told = []
    try:
        for index in range(10_000):
            trajectory = make_trajectory(make_admission(index, 0), length=2000)
            ledger.complete(trajectory, disposition=Disposition.EVALUATED)
            told.append(trajectory.id)
    except ResourceError as error:
        print(error)
    assert [row.id for row in ledger.rows()] == told, "rows differ from what was acknowledged"
    assert ledger.audit().ok
with Ledger.open(path) as ledger:
    assert len(ledger.rows()) == len(told) > 10
    assert ledger.audit().ok
print("consistent")
"""


def test_a_disk_that_runs_full_loses_nothing_that_was_acknowledged():
    done = on_small_disk(FILL_THE_DISK, disk_bytes=2_000_000)
    if done is None:
        pytest.skip("needs a user namespace for a file system of its own")
    assert done.stderr == ""
    assert "full" in done.stdout
    assert "MB are free there" in done.stdout
    assert "consistent" in done.stdout


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from ledger_cases import make_admission, make_batch, make_group, make_report, make_trajectory
from longarc.records.outcome import Disposition
from longarc.runs.ledger import Ledger

def say(*words):
    print(*words, flush=True)

ledger = Ledger.open(Path(sys.argv[1]))
again = [make_admission(a.group_index, a.member_index, attempt=a.attempt + 1) for a in ledger.cancel_open("rl")]
ledger.admit(again)
buffered = ledger.pending("rl")
todo = list(again)
while True:
    for admission in todo:
        ledger.append_turn(admission.trajectory_id, 0, b"x" * 3000)
        trajectory = make_trajectory(admission, length=200)
        ledger.complete(trajectory)
        say("complete", trajectory.id)
        buffered.append(trajectory)
    if buffered:
        groups = {}
        for trajectory in buffered:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        batch = make_batch([make_group(g) for g in groups.values()], step=len(ledger.steps("rl")))
        ledger.commit_step(batch, make_report(batch))
        say("step", batch.step)
        buffered = []
    first = ledger.num_groups_admitted("rl")
    todo = [make_admission(g, m) for g in (first, first + 1) for m in range(2)]
    ledger.admit(todo)
"""


@pytest.mark.parametrize("kills", [[0, 3, 7, 12], [1, 5, 4, 9]])
def test_a_killed_writer_leaves_a_ledger_with_everything_it_acknowledged(tmp_path, kills):
    path = tmp_path / "ledger.sqlite"
    completed, steps = set(), 0
    for count in kills:
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(TESTS), str(TESTS.parent / "src")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count):
            kind, what = writer.stdout.readline().split()
            completed |= {what} if kind == "complete" else set()
            steps += kind == "step"
        # The writer is somewhere in the middle of what comes next.
        writer.send_signal(signal.SIGKILL)
        said = writer.communicate()[0]
        # The kill may have come in the middle of a line.
        for line in said[: said.rfind("\n") + 1].splitlines():
            kind, what = line.split()
            completed |= {what} if kind == "complete" else set()
            steps += kind == "step"

        with Ledger.open(path) as ledger:
            assert completed <= {row.id for row in ledger.rows()}
            assert len(ledger.steps("rl")) >= steps
            for finding in ledger.audit().findings:
                assert "has not ended" in finding or "has no disposition" in finding

    with Ledger.open(path) as ledger:
        ledger.cancel_open("rl")
        ledger.dispose({t.id: (Disposition.GROUP_DROPPED, "end") for t in ledger.pending("rl")})
        assert ledger.audit().findings == ()
        assert len(ledger.steps("rl")) >= 1
