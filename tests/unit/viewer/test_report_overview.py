import pytest

from longarc.runs.directory import RunDirectory
from longarc.runs.files import json_document, write_atomically
from longarc.runs.metrics import JsonLinesSink
from longarc.viewer.overview import num_parameters_in, stage_times
from longarc.viewer.report import report_data
from report_cases import RECIPE, Clock, finish, make_cell, supervised


class SetClock:
    """Wall time that a test sets."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def run(tmp_path, clock):
    with RunDirectory.create(
        tmp_path / "run", recipe=RECIPE, seeds={"run": 0}, clock=clock
    ) as directory:
        yield directory


def statuses(run):
    return {stage["name"]: stage["status"] for stage in report_data(run)["stages"]}


def test_a_run_that_has_done_nothing_yet_has_a_report(run):
    run.close()
    look = RunDirectory.look(run.path)
    assert set(statuses(look).values()) == {"waiting"}
    assert report_data(look)["browser"]["trajectories"] == []


def test_times_add_up_over_starts_and_a_killed_start_counts_up_to_its_last_metric(run, clock):
    sink = JsonLinesSink(run.metrics_path, clock=clock)
    clock.now_s = 100.0
    run.event("stage_started", stage="sft")
    clock.now_s = 130.0
    sink.write(stage="sft", step=1, values={})
    # Killed here. The next day the same step is taken again, and interrupted.
    clock.now_s = 90_000.0
    run.event("recipe_changed")
    run.event("stage_started", stage="sft")
    clock.now_s = 90_005.0
    sink.write(stage="sft", step=1, values={})
    run.event("stage_ended", stage="sft", elapsed_s=7.0)
    sink.close()
    assert stage_times(run) == {"sft": 30.0 + 7.0}


def test_a_stage_that_runs_counts_up_to_its_last_metric(run, clock):
    run.event("stage_started", stage="sft")
    clock.now_s = 12.0
    sink = JsonLinesSink(run.metrics_path, clock=clock)
    sink.write(stage="sft", step=1, values={})
    sink.close()
    assert stage_times(run) == {"sft": 12.0}


def test_stages_are_done_running_stopped_or_waiting(run, clock):
    sink = JsonLinesSink(run.metrics_path, clock=Clock())
    supervised(run, sink, "pretrain", 2, start=1.0)
    sink.write(stage="sft", step=1, values={"loss/lm_nats": 1.0})
    sink.close()
    assert statuses(run)["pretrain"] == "done"
    assert statuses(run)["sft"] == "running"
    run.close()
    found = statuses(RunDirectory.look(run.path))
    assert (found["sft"], found["distill"]) == ("stopped", "waiting")


def test_an_evaluation_asked_for_later_stands_behind_the_recipes_stages(run):
    cells = [make_cell(stage, "files", 3) for stage in ("sft", "distill")]
    directory = run.stage("eval-65").path
    directory.mkdir(parents=True)
    write_atomically(directory / "results.json", json_document({"cells": cells}))
    data = report_data(run)
    added = data["stages"][-1]
    assert (added["name"], added["status"], added["elapsed_s"]) == ("eval-65", "done", 4.0)
    assert [(e["name"], e["num_tasks"]) for e in data["evaluations"]] == [("eval-65", 65)]


def test_an_evaluation_that_was_cut_off_is_not_done(run):
    directory = run.stage("eval").path
    directory.mkdir(parents=True)
    cells = [make_cell("sft", "files", 3)]
    write_atomically(directory / "results.json", json_document({"cells": cells}))
    run.close()
    look = RunDirectory.look(run.path)
    assert statuses(look)["eval"] == "stopped"
    (stage,) = [s for s in report_data(look)["stages"] if s["name"] == "eval"]
    assert (stage["num_steps"], stage["num_planned_steps"]) == (1, 6)


def test_a_stage_whose_result_is_damaged_says_so(run):
    finish(run, "sft")
    (run.stage("sft").path / "final.json").write_text("{")
    assert statuses(run)["sft"] == "damaged"


def test_parameters_are_counted_from_the_header_of_the_weights(tmp_path):
    path = tmp_path / "model.safetensors"
    header = b'{"__metadata__":{"format":"pt"},"a":{"shape":[3,5]},"b":{"shape":[]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert num_parameters_in(path) == 16


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x04" + bytes(7) + b'{"a"']
)
def test_weights_that_cannot_be_read_have_no_number(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert num_parameters_in(path) is None
    assert num_parameters_in(tmp_path / "missing") is None
