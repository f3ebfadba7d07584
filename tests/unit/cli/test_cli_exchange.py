"""``longarc runs export`` and ``import``."""

import json

import pytest

from ledger_cases import make_admission, make_batch, make_group, make_report, make_trajectory
from longarc.cli.main import main
from longarc.runs.directory import RunDirectory
from longarc.runs.exchange import json_lines, read_trajectories, write_lines


def make_run(path):
    with (
        RunDirectory.create(path, recipe={"name": path.name}, seeds={}) as run,
        run.open_ledger() as ledger,
    ):
        admissions = [make_admission(0, member) for member in range(2)]
        ledger.admit(admissions)
        trajectories = [make_trajectory(admission) for admission in admissions]
        for trajectory in trajectories:
            ledger.complete(trajectory)
        batch = make_batch([make_group(trajectories)])
        ledger.commit_step(batch, make_report(batch))
    return path


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "a")


def rows(run):
    with RunDirectory.look(run).read_ledger() as ledger:
        return ledger.rows()


def test_trajectories_are_printed_one_a_line(run, capsys):
    assert main(["runs", "export", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["rl/0/0/0", "rl/0/1/0"]
    assert main(["runs", "export", str(run), "rl/0/1/0", "--format", "atif"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["schema_version"] == "ATIF-v1.8"


@pytest.mark.parametrize("form", ["jsonl", "atif"])
def test_what_one_run_exports_another_one_imports(form, run, tmp_path, capsys):
    out = tmp_path / ("all.jsonl" if form == "jsonl" else "all")
    options = ["--no-prompt-ids"] if form == "atif" else []
    assert main(["runs", "export", str(run), "--format", form, "--out", str(out), *options]) == 0
    assert capsys.readouterr().out == f"2 trajectories in {out}\n"
    other = make_run(tmp_path / "b")
    assert main(["runs", "import", str(other), str(out)]) == 0
    assert (
        capsys.readouterr().out
        == f"2 trajectories added to {other} as stage import, 2 of them with token ids\n"
    )
    added = rows(other)[2:]
    assert [row.id for row in added] == ["import/rl/0/0/0", "import/rl/0/1/0"]
    assert {(row.stage, row.disposition, row.group_id) for row in added} == {
        ("import", "collected", "import/rl/0")
    }
    assert {row.disposition_reason for row in added} == {f"imported from {out}"}
    assert main(["runs", "audit", str(other)]) == 0
    assert main(["runs", "show", str(other), "import/rl/0/0/0"]) == 0
    event = json.loads((other / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["trajectories"]) == ("import", 2)
    imported = list(read_trajectories(other))[2:]
    assert [t.segments for t in imported] == [t.segments for t in read_trajectories(run)]


def test_filters_choose_what_is_exported(run, capsys):
    def number(*options):
        assert main(["runs", "export", str(run), *options]) == 0
        return len(capsys.readouterr().out.splitlines())

    assert number("--stage", "rl", "--family", "files", "--outcome", "completed") == 2
    assert number("--disposition", "trained") == 2
    assert number("--disposition", "served") == 0
    assert number("--stage", "sft") == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["rl/9/9/9"], "no trajectory 'rl/9/9/9'; there are"),
        (["rl/0/0/0", "--stage", "rl"], "--stage chooses among all"),
        (["--no-prompt-ids"], "--no-prompt-ids is for --format atif"),
        (["--format", "atif", "--out", "."], "not an empty directory"),
    ],
)
def test_what_cannot_be_exported_is_refused(run, options, says, capsys, monkeypatch):
    monkeypatch.chdir(run)
    assert main(["runs", "export", str(run), *options]) == 2
    assert says in capsys.readouterr().err


def test_a_damaged_file_among_good_ones_adds_nothing(run, tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.json"
    write_lines(good, json_lines([make_trajectory()]))
    bad.write_text('{"schema_version": "ATIF-v1.8"')
    before = rows(run)
    assert main(["runs", "import", str(run), str(good), str(bad)]) == 4
    assert f"{bad} is no JSON" in capsys.readouterr().err
    assert main(["runs", "import", str(run), str(good), str(good)]) == 4
    assert "already; nothing was added" in capsys.readouterr().err
    assert rows(run) == before
    assert not (run / "events.jsonl").exists()


def test_only_a_run_that_nobody_uses_takes_trajectories(run, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    write_lines(path, json_lines([make_trajectory()]))
    with RunDirectory.hold(run):
        assert main(["runs", "import", str(run), str(path)]) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert main(["runs", "import", str(tmp_path / "nosuch"), str(path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert not (tmp_path / "nosuch").exists()
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert main(["runs", "import", str(run), str(empty)]) == 0
    shown = capsys.readouterr()
    assert "no trajectories" in shown.err
    assert "0 trajectories added" in shown.out
