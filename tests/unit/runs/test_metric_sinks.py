import contextlib
import errno
import json
import math
import os
import sys

import pytest

from longarc.errors import ConfigError, ResourceError
from longarc.records.ports import MetricSink
from longarc.runs.files import JsonLines, read_json_lines
from longarc.runs.metrics import (
    JsonLinesSink,
    MlflowSink,
    SinkGroup,
    WandbSink,
    open_sinks,
    read_metrics,
)
from small_disk import file_size_limit


def test_metrics_are_read_back_as_written(tmp_path):
    sink = JsonLinesSink(tmp_path / "m.jsonl", clock=lambda: 3.0)
    sink.write(stage="sft", step=0, values={"loss/tokens": 2.5, "rollout/lag_steps": 1})
    sink.close()
    [row] = read_metrics(tmp_path / "m.jsonl")
    assert (row.stage, row.step, row.time_s) == ("sft", 0, 3.0)
    assert row.values == {"loss/tokens": 2.5, "rollout/lag_steps": 1.0}


def test_numbers_that_json_lacks_survive(tmp_path):
    sink = JsonLinesSink(tmp_path / "m.jsonl")
    sink.write(stage="sft", step=0, values={"a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close()
    values = read_metrics(tmp_path / "m.jsonl")[0].values
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (math.inf, -math.inf)
    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)


def test_a_torn_last_line_is_dropped_on_reopening(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = JsonLinesSink(path)
    for step in range(3):
        sink.write(stage="sft", step=step, values={"loss": float(step)})
    sink.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert [row.step for row in read_metrics(path)] == [0, 1]

    sink = JsonLinesSink(path)
    sink.write(stage="sft", step=2, values={"loss": 7.0})
    sink.close()
    assert [(row.step, row.values["loss"]) for row in read_metrics(path)] == [
        (0, 0),
        (1, 1),
        (2, 7),
    ]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"time_s": 1')
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_a_step_taken_again_counts_once_with_its_newer_values(tmp_path):
    sink = JsonLinesSink(tmp_path / "m.jsonl")
    sink.write(stage="rl", step=0, values={"loss": 1.0, "seen": 1.0})
    sink.write(stage="rl", step=0, values={"loss": 2.0})
    sink.close()
    [row] = read_metrics(tmp_path / "m.jsonl")
    assert row.values == {"loss": 2.0, "seen": 1.0}


def test_a_full_disk_is_a_resource_error_and_leaves_whole_lines(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl")
    for index in range(12):
        lines.append({"index": index})
    with file_size_limit(160), pytest.raises(ResourceError, match="cannot append"):
        lines.append({"text": "x" * 100})
    lines.append({"index": "after"})
    lines.close()
    records = read_json_lines(tmp_path / "m.jsonl")
    assert [record["index"] for record in records] == [*range(12), "after"]


def test_a_place_that_is_not_there_is_a_resource_error(tmp_path):
    with pytest.raises(ResourceError, match="cannot write"):
        JsonLines(tmp_path / "nowhere" / "m.jsonl")


def test_no_file_means_no_records(tmp_path):
    assert read_json_lines(tmp_path / "m.jsonl") == []


def test_tensorboard_gets_event_files_that_hold_the_values(tmp_path):
    pytest.importorskip("tensorboardX")
    sinks = open_sinks(tmp_path, ["tensorboard"], run_name="r", recipe={})
    assert isinstance(sinks, MetricSink)
    sinks.write(stage="sft", step=1, values={"loss/tokens": 2.5})
    sinks.close()
    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"sft/loss/tokens" in events.read_bytes()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_sink_whose_package_is_missing_says_how_to_install_it(tmp_path, monkeypatch, name):
    for module in ("tensorboardX", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"sink '{name}' needs .*pip install"):
        open_sinks(tmp_path, [name], run_name="r", recipe={})


def test_an_unknown_sink_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"'console': choose from .*'wandb'"):
        open_sinks(tmp_path, ["console"], run_name="r", recipe={})


class FakeService:
    """Stands for the wandb and mlflow modules: remembers every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call

    @property
    def info(self):
        return self

    experiment_id = "e"
    run_id = "r"


def test_wandb_gets_one_row_a_step_and_continues_a_run(tmp_path, monkeypatch):
    service = FakeService()
    monkeypatch.setitem(sys.modules, "wandb", service)
    sink = WandbSink(tmp_path, name="quick", recipe={"seed": 1})
    sink.write(stage="sft", step=3, values={"loss": 1.0})
    sink.close()
    (_, _, init), (_, row, _), (last, _, _) = service.calls
    assert (init["id"], init["resume"], init["config"]) == ("quick", "allow", {"seed": 1})
    assert row == ({"sft/loss": 1.0, "sft/step": 3},)
    assert last == "finish"


def test_mlflow_gets_one_value_a_metric(tmp_path, monkeypatch):
    service = FakeService()
    monkeypatch.setitem(sys.modules, "mlflow", service)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sink = MlflowSink(tmp_path, name="quick")
    sink.write(stage="sft", step=3, values={"loss": 1.0})
    sink.close()
    assert ("log_metric", ("r", "sft/loss", 1.0), {"step": 3}) in service.calls
    assert service.calls[-1][0] == "set_terminated"


class FullSink:
    """Finds no room for anything."""

    def write(self, *, stage, step, values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_sink_without_room_is_a_typed_error_that_names_it(tmp_path):
    group = SinkGroup([JsonLinesSink(tmp_path / "m.jsonl"), FullSink()])
    with (
        contextlib.closing(group),
        pytest.raises(ResourceError, match=r"FullSink cannot write metrics: .*No space left"),
    ):
        group.write(stage="sft", step=0, values={"loss": 1.0})
    assert len(read_metrics(tmp_path / "m.jsonl")) == 1


def test_sinks_are_all_closed_and_what_went_wrong_before_is_what_is_raised(tmp_path, caplog):
    last = JsonLinesSink(tmp_path / "m.jsonl")
    group = SinkGroup([FullSink(), last])
    with pytest.raises(ZeroDivisionError), contextlib.closing(group):
        raise ZeroDivisionError
    assert "FullSink cannot be closed" in caplog.text
    with pytest.raises(ValueError, match="closed"):
        last.write(stage="sft", step=0, values={"loss": 1.0})
