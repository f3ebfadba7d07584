"""Metric sinks: JSON lines always, TensorBoard, Weights & Biases and MLflow where asked for.

Every sink satisfies ``longarc.records.ports.MetricSink``. The JSON lines are the truth that the report
reads; the others are windows for people. Their packages are imported when a sink is opened.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from longarc.errors import ConfigError, LongArcError, ResourceError, boundary
from longarc.records.ports import MetricSink
from longarc.runs.files import JsonLines, read_json_lines

_log = logging.getLogger(__name__)


class JsonLinesSink:
    """Appends one line a step: ``{"time_s", "stage", "step", "values"}``."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open ``metrics.jsonl``; the clock is wall time [seconds since the epoch]."""
        self._lines = JsonLines(path)
        self._clock = clock

    def write(self, *, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line. JSON has no NaN or infinity: they are written as strings."""
        safe = {name: v if math.isfinite(v) else str(float(v)) for name, v in values.items()}
        self._lines.append({"time_s": self._clock(), "stage": stage, "step": step, "values": safe})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """The metrics of one step, read back."""

    stage: str
    step: int
    time_s: float
    """Wall clock [seconds since the epoch]."""
    values: Mapping[str, float]


def read_metrics(path: Path) -> list[MetricRow]:
    """Read ``metrics.jsonl``, ordered as written.

    A step that was taken again after a crash stands in the file twice: the later line counts, name by name.
    """
    rows: dict[tuple[str, int], MetricRow] = {}
    for record in read_json_lines(path):
        key = (record["stage"], record["step"])
        values = {name: float(value) for name, value in record["values"].items()}
        before = rows.pop(key).values if key in rows else {}
        rows[key] = MetricRow(
            stage=key[0], step=key[1], time_s=record["time_s"], values={**before, **values}
        )
    return list(rows.values())


class TensorBoardSink:
    """Writes event files that ``tensorboard --logdir`` shows."""

    def __init__(self, directory: Path) -> None:
        """Open an event file in ``directory``.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        module = _imported("tensorboardX", "tensorboardX", sink="tensorboard")
        self._writer = module.SummaryWriter(logdir=str(directory))

    def write(self, *, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar a metric, under the name of its stage."""
        for name, value in values.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """Writes to Weights & Biases; the user logs in with its own command line."""

    def __init__(self, directory: Path, *, name: str, recipe: Mapping[str, Any]) -> None:
        """Start, or continue, the run called ``name``.

        Raises:
            ConfigError: wandb is not installed.
        """
        module = _imported("wandb", "longarc[wandb]", sink="wandb")
        self._run = module.init(
            project="longarc",
            name=name,
            id=name,
            resume="allow",
            dir=str(directory),
            config=dict(recipe),
        )

    def write(self, *, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log one row. Each stage has its own step axis, since wandb's must grow over the whole run."""
        row = {f"{stage}/{name}": value for name, value in values.items()}
        self._run.log({**row, f"{stage}/step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """Writes to MLflow, at the address of ``MLFLOW_TRACKING_URI`` or into the run directory."""

    def __init__(self, directory: Path, *, name: str) -> None:
        """Start a run called ``name``.

        Raises:
            ConfigError: mlflow is not installed.
        """
        module = _imported("mlflow", "longarc[mlflow]", sink="mlflow")
        self._client = module.MlflowClient(tracking_uri=_mlflow_address(directory))
        found = self._client.get_experiment_by_name("longarc")
        experiment = found.experiment_id if found else self._client.create_experiment("longarc")
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id

    def write(self, *, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log one value a metric, under the name of its stage."""
        for name, value in values.items():
            self._client.log_metric(self._run_id, f"{stage}/{name}", value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def _mlflow_address(directory: Path) -> str | None:
    # None lets MLflow follow its own environment variable.
    return None if os.environ.get("MLFLOW_TRACKING_URI") else (directory / "mlflow").as_uri()


class SinkGroup:
    """Several sinks behind one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        """Take over sinks, closing them together."""
        self._sinks = tuple(sinks)

    def write(self, *, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write to every sink.

        Raises:
            ResourceError: one cannot write.
        """
        for sink in self._sinks:
            with boundary(ResourceError, f"{type(sink).__name__} cannot write metrics"):
                sink.write(stage=stage, step=step, values=values)

    def close(self) -> None:
        """Close every sink; one that cannot be closed is a warning, because something else may have gone wrong before."""
        for sink in self._sinks:
            try:
                with boundary(ResourceError, f"{type(sink).__name__} cannot be closed"):
                    sink.close()
            except LongArcError as error:
                _log.warning("%s; its last metrics may be missing, metrics.jsonl has them", error)


def open_sinks(
    directory: Path, names: Iterable[str], *, run_name: str, recipe: Mapping[str, Any]
) -> SinkGroup:
    """Open JSON lines plus the named sinks in a run directory.

    Args:
        directory: the run directory.
        names: of ``tensorboard``, ``wandb``, ``mlflow``.
        run_name: how the run is called in shared places.
        recipe: the resolved recipe, for those who show it.

    Raises:
        ConfigError: a name is unknown, or its package is not installed.
    """
    makers: dict[str, Callable[[], MetricSink]] = {
        "tensorboard": lambda: TensorBoardSink(directory / "tensorboard"),
        "wandb": lambda: WandbSink(directory, name=run_name, recipe=recipe),
        "mlflow": lambda: MlflowSink(directory, name=run_name),
    }
    wanted = list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in makers]
    if unknown:
        raise ConfigError(f"unknown metric sink {unknown[0]!r}: choose from {sorted(makers)}")
    sinks: list[MetricSink] = [makers[name]() for name in wanted]
    return SinkGroup([JsonLinesSink(directory / "metrics.jsonl"), *sinks])


def _imported(module: str, package: str, *, sink: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the metric sink {sink!r} needs {module}, which is not installed: "
            f"pip install '{package}', or take {sink!r} out of the recipe"
        ) from error
