"""Trajectories in files: what is found, what is refused, and that nothing is half-written."""

import json
from dataclasses import replace

import pytest

from ledger_cases import make_admission, make_trajectory
from longarc.errors import ConfigError, ContractError, LedgerError, ResourceError
from longarc.records.outcome import Disposition
from longarc.records.turn import Turn
from longarc.runs.atif import trajectory_to_atif
from longarc.runs.directory import RunDirectory
from longarc.runs.exchange import (
    atif_lines,
    json_lines,
    read_trajectories,
    write_atif,
    write_lines,
)
from longarc.runs.ledger import Ledger
from longarc.runs.record_json import to_json_line, trajectory_to_json
from small_disk import file_size_limit

FOREIGN = {
    "schema_version": "ATIF-v1.5",
    "agent": {"name": "a", "version": "1"},
    "steps": [{"step_id": 1, "source": "user", "message": "q"}],
}


def some(number=3):
    return [make_trajectory(make_admission(0, member)) for member in range(number)]


@pytest.mark.parametrize("form", ["jsonl", "atif"])
def test_what_is_written_is_read_back_equal_and_in_order(form, tmp_path):
    odd = [
        replace(make_trajectory(), id=i)
        for i in ("a/b", "a%2Fb", "..", "%2E.", "\ud800", "\\ud800", "é" * 300)
    ]
    if form == "jsonl":
        path = tmp_path / "all.jsonl"
        assert write_lines(path, json_lines(odd)) == len(odd)
        assert list(read_trajectories(path)) == odd
    else:
        path = tmp_path / "all"
        assert write_atif(path, odd, with_prompt_ids=True) == len(odd)
        assert {t.id for t in read_trajectories(path)} == {t.id for t in odd}
        assert all(len(file.name) < 255 for file in path.iterdir())


def test_one_id_begins_like_another_and_both_have_a_file(tmp_path):
    long = [replace(make_trajectory(), id="x" * 200 + end) for end in ("a", "b")]
    write_atif(tmp_path / "t", long, with_prompt_ids=False)
    assert len(list(read_trajectories(tmp_path / "t"))) == 2


def test_lines_may_be_of_both_forms_and_have_blank_ones_between(tmp_path):
    path = tmp_path / "mixed.jsonl"
    ours = make_trajectory()
    lines = [*json_lines([ours]), "", *atif_lines([ours], with_prompt_ids=True), json.dumps(FOREIGN)]  # fmt: skip
    path.write_text("\n".join(lines))
    first, second, third = read_trajectories(path)
    assert first == second == ours
    assert third.id == "mixed/4"


def test_a_directory_is_looked_through_for_files_named_like_trajectories(tmp_path):
    trial = tmp_path / "job" / "trial-1" / "agent"
    trial.mkdir(parents=True)
    (trial / "trajectory.json").write_text(json.dumps(FOREIGN))
    (trial / "config.json").write_text("{}")
    (trial / "trajectory.txt").write_text("no")
    (trial / ".trajectory.json.tmp").write_text("{")
    (tmp_path / "b.trajectory.json").write_text(json.dumps(FOREIGN))
    assert [t.id for t in read_trajectories(tmp_path)] == ["b", "job/trial-1/agent/trajectory"]
    (only,) = read_trajectories(trial / "trajectory.json")
    assert only.id == "trajectory"


def test_a_run_is_read_from_its_ledger(tmp_path):
    path = tmp_path / "run"
    with RunDirectory.create(path, recipe={"name": "r"}, seeds={}) as run:
        ledger = run.open_ledger()
        ledger.collect(some(), reason="test")
        ledger.close()
    assert list(read_trajectories(path)) == some()


def test_places_without_trajectories_are_refused_with_what_would_be_one(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError, match="no trajectory file"):
        list(read_trajectories(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match="no file whose name holds 'trajectory'"):
        list(read_trajectories(tmp_path))
    with pytest.raises(ConfigError, match="there is no"):
        list(read_trajectories(tmp_path / "nosuch"))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "trajectory.json"
    path.write_text("{}")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ResourceError, match=r"cannot read .*trajectory\.json: Permission denied"):
        list(read_trajectories(path))


def changed(**changes):
    return {**json.loads(to_json_line(trajectory_to_json(make_trajectory()))), **changes}


def changed_segment(**changes):
    value = changed()
    value["segments"][0].update(changes)
    return value


def with_turns(*parents):
    turn = Turn(
        segment_order=0,
        start=0,
        num_sampled=0,
        parent=None,
        said=(),
        answer=make_trajectory().messages[1],
        finish_reason="stop",
        elapsed_s=0.0,
    )
    turns = tuple(replace(turn, parent=parent) for parent in parents)
    return trajectory_to_json(replace(make_trajectory(), turns=turns))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 2 is no JSON"),
        (b'{"a": "\xff"}', "line 2 is no JSON"),
        (b"[" * 100_000, "line 2 is no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 2 is no JSON"),
        (b"5", "holds a int"),
        (b"{}", "schema_version None"),
        (changed(reward="high"), "reward: .*'high'"),
        (changed(outcome="won"), "'won'"),
        (changed(nosuch=1), "nosuch: Extra inputs"),
        (changed(messages=[{"role": "user", "content": 5}]), r"messages\.0\.content"),
        (changed(messages=[{"role": "bard", "content": ""}]), "bard"),
        (changed_segment(token_ids=["1"]), r"segments\.0\.token_ids\.0"),
        (changed_segment(token_ids=[1, 2]), "token_ids of segment 0 are 2 tokens"),
        (changed_segment(sampled_runs=[10**15]), "token_ids of segment 0 are 12 tokens"),
        (changed_segment(logprobs=[0.5]), "logprobs of segment 0 are 1 tokens"),
        (changed_segment(trained_runs=[0, 12]), "did not sample"),
        (changed_segment(version_runs=[[0, 1, 2]]), "version_runs"),
        (with_turns(0), "turn 0 continues turn 0"),
        (with_turns(None, None, 2), "turn 2 continues turn 2"),
    ],
)
def test_a_line_that_is_no_trajectory_is_named(line, says, tmp_path):
    path = tmp_path / "t.jsonl"
    data = line if isinstance(line, bytes) else to_json_line(line).encode()
    path.write_bytes(next(json_lines([make_trajectory()])).encode() + b"\n" + data + b"\n")
    with pytest.raises(ContractError, match=says) as caught:
        list(read_trajectories(path))
    assert f"{path}, line 2" in str(caught.value)


def test_writing_fails_whole_and_leaves_what_was_there(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("old")

    def lines():
        yield "new"
        raise ContractError("damaged")

    with pytest.raises(ContractError, match="damaged"):
        write_lines(path, lines())
    with file_size_limit(1000), pytest.raises(ResourceError, match="cannot write"):
        write_lines(path, json_lines(some(5)))
    with file_size_limit(1000), pytest.raises(ResourceError, match="cannot write"):
        write_atif(tmp_path / "new" / "d", some(), with_prompt_ids=True)
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]
    assert path.read_text() == "old"


def test_a_directory_that_holds_something_gets_nothing_more(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="not an empty directory"):
        write_atif(tmp_path, some(), with_prompt_ids=True)


def test_the_ledger_takes_all_or_none(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:

        def damaged():
            yield from some(2)
            raise ContractError("the third file is damaged")

        with pytest.raises(ContractError, match="third"):
            ledger.collect(damaged(), reason="test")
        assert ledger.rows() == []
        with pytest.raises(LedgerError, match="already; nothing was added"):
            ledger.collect([*some(2), some(1)[0]], reason="test")
        assert ledger.rows() == []
        assert ledger.collect(some(), reason="from a file") == 3
        assert {(r.disposition, r.disposition_reason) for r in ledger.rows()} == {
            (Disposition.COLLECTED, "from a file")
        }
        assert ledger.audit().ok
        assert list(ledger.trajectories()) == some()


def test_a_document_says_where_it_is_damaged(tmp_path):
    path = tmp_path / "trajectory.json"
    document = trajectory_to_atif(make_trajectory())
    del document["extra"], document["steps"][1]["source"]
    path.write_text(json.dumps(document))
    with pytest.raises(ContractError, match=r"trajectory\.json: .*steps\.1\.source"):
        list(read_trajectories(path))
