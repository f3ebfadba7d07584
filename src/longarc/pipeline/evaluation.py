"""Stage ``eval``: every checkpoint on every family's held-out tasks, sampled as in training."""

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import orjson

from longarc.config.recipe import INITIAL
from longarc.config.stages import EvalConfig
from longarc.errors import ContractError, first_of
from longarc.orchestrator.rollout import RolloutSpec, run_rollout
from longarc.pipeline.rl import Serving, sampling_of, serving
from longarc.pipeline.workspace import Workspace
from longarc.records.metric import Metric
from longarc.records.outcome import Disposition
from longarc.records.ports import TaskFamily
from longarc.records.task import Task
from longarc.records.trajectory import Admission, Trajectory
from longarc.runs.directory import RunDirectory
from longarc.runs.files import json_document, make_directory, write_atomically
from longarc.viewer.matrix import read_evaluations
from longarc.viewer.paired import paired_difference

MAX_LEVELS = 8
"""Rows of success by difficulty; where there are more difficulties they are put into ranges."""

RESULTS_FILE = "results.json"
"""Name of the evaluation matrix in the stage's directory."""


async def run(workspace: Workspace, stage: str, config: EvalConfig) -> None:
    """Fill the matrix of the recipe's eval stage."""
    await evaluate(
        workspace,
        stage,
        config,
        stages=config.stages,
        families=sorted(config.tasks),
        num_tasks=config.tasks_per_family,
    )


async def evaluate(
    workspace: Workspace,
    name: str,
    config: EvalConfig,
    *,
    stages: Sequence[str],
    families: Sequence[str],
    num_tasks: int,
) -> Path:
    """Evaluate checkpoints on held-out tasks; return the file of results.

    Cells that are already in the file are kept, so that an evaluation that was cut off goes on.

    Args:
        workspace: the run.
        name: what the ledger and the results call this evaluation.
        config: how to sample.
        stages: stages whose final checkpoints are evaluated.
        families: task families.
        num_tasks: held-out tasks per family and checkpoint [tasks].
    """
    directory = workspace.run.stage(name).path
    make_directory(directory)
    order = [INITIAL, *workspace.recipe.stages]
    matrix = _Matrix(directory / RESULTS_FILE, order, stages, families, num_tasks)
    missing = matrix.missing_stages()
    # Checkpoints share the cores: engines of one thread each do more together than one of several.
    is_embedded = workspace.recipe.engine.kind == "embedded"
    # A server loads one checkpoint at a time, and starting several of them would only share the cores.
    num_at_once = max(1, min(workspace.recipe.threads, len(missing))) if is_embedded else 1
    evaluation = _Evaluation(
        workspace=workspace,
        name=name,
        config=config,
        matrix=matrix,
        families=workspace.families(config.tasks),
        num_threads=workspace.recipe.threads // num_at_once,
    )
    places = asyncio.Semaphore(num_at_once)
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for stage in missing:
                group.create_task(evaluation.fill_row(stage, places))
    except ExceptionGroup as failures:
        failure = first_of(failures)
    if failure is not None:
        raise failure
    workspace.check_stop()
    return matrix.path


class _Matrix:
    """The file of results: cells in the order of the recipe, whatever ends or is asked for first."""

    def __init__(
        self,
        path: Path,
        order: Sequence[str],
        stages: Sequence[str],
        families: Sequence[str],
        num_tasks: int,
    ) -> None:
        self.path, self.num_tasks = path, num_tasks
        self._order = order
        self._asked = [(stage, family) for stage in stages for family in families]
        self._results = _results_so_far(path)

    @property
    def num_cells(self) -> int:
        """Cells that are asked for."""
        return len(self._asked)

    @property
    def num_filled(self) -> int:
        """Cells of these that are done."""
        return len(self._asked) - len(self._missing())

    def missing_stages(self) -> list[str]:
        """Return the checkpoints that lack a cell."""
        return list(dict.fromkeys(stage for stage, _ in self._missing()))

    def missing_families(self, stage: str) -> list[str]:
        """Return the families on which this checkpoint was not evaluated yet."""
        return [family for s, family in self._missing() if s == stage]

    def add(self, cell: dict[str, Any]) -> None:
        """Write the file with one more cell."""
        self._results["cells"].append(cell)
        self._results["cells"].sort(key=lambda c: (self._order.index(c["stage"]), c["family"]))
        write_atomically(self.path, json_document(self._results))

    def _missing(self) -> list[tuple[str, str]]:
        done = {
            (cell["stage"], cell["family"])
            for cell in self._results["cells"]
            if cell["num_tasks"] == self.num_tasks
        }
        return [key for key in self._asked if key not in done]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    """One evaluation while it goes."""

    workspace: Workspace
    name: str
    config: EvalConfig
    matrix: _Matrix
    families: Mapping[str, TaskFamily]
    num_threads: int
    """Compute threads of each engine."""

    async def fill_row(self, stage: str, places: asyncio.Semaphore) -> None:
        """Evaluate one checkpoint on every family that is missing, once there is a place."""
        async with places:
            if self.workspace.stop.is_set():
                return
            loaded = self.workspace.load(self.workspace.final(stage))
            version = loaded.manifest.policy_version
            async with serving(
                self.workspace,
                loaded,
                self.config.rollout,
                policy_version=version,
                num_threads=self.num_threads,
            ) as serve:
                for family in self.matrix.missing_families(stage):
                    cell = await self._cell(serve, stage, family, version)
                    if cell is None:
                        return
                    self.matrix.add(cell)
                    self._record(cell)

    async def _cell(
        self, serve: Serving, stage: str, family: str, version: int
    ) -> dict[str, Any] | None:
        """Evaluate one checkpoint on one family; None where it was stopped: a cell is whole or is done again."""
        started_s = time.perf_counter()
        workspace, config, built = self.workspace, self.config, self.families[family]
        spec = RolloutSpec(
            sampling=sampling_of(config.rollout, serve.gateway),
            max_context_tokens=config.rollout.max_context_tokens,
            timeout_s=config.rollout_timeout_s,
            grader_timeout_s=60.0,
        )
        slots = asyncio.Semaphore(config.max_concurrent_rollouts)

        async def one(index: int, task: Task) -> Trajectory | None:
            async with slots:
                if workspace.stop.is_set():
                    return None
                admission = self._admission(stage, family, index, task, version)
                trajectory = await run_rollout(
                    admission, built, serve.sessions, serve.sandboxes, spec=spec, clock=time.time
                )
                workspace.ledger.complete(trajectory, disposition=Disposition.EVALUATED)
                return trajectory

        tasks = list(islice(built.tasks("test", cursor=0), self.matrix.num_tasks))
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(i, task)) for i, task in enumerate(tasks)]
        ended = [task.result() for task in running]
        trajectories = [trajectory for trajectory in ended if trajectory is not None]
        if len(trajectories) < len(tasks):
            return None
        return summarise(trajectories) | {
            "stage": stage,
            "family": family,
            "num_tasks": self.matrix.num_tasks,
            "policy_version": version,
            "elapsed_s": time.perf_counter() - started_s,
        }

    def _record(self, cell: dict[str, Any]) -> None:
        name = f"success/{cell['stage']}/{cell['family']}"
        metrics = [
            Metric(name, cell["num_solved"], cell["num_graded"]),
            Metric("excluded/environment_fault", cell["num_excluded"], reduce="sum"),
        ]
        self.workspace.record(self.name, self.matrix.num_filled, self.matrix.num_cells, metrics)

    def _admission(
        self, stage: str, family: str, index: int, task: Task, version: int
    ) -> Admission:
        attempt = 0
        group_id = f"{self.name}/{stage}/{family}/{index}"
        while self.workspace.ledger.row(f"{group_id}/{attempt}") is not None:
            attempt += 1  # an evaluation that was cut off did this task before
        seed_text = f"{self.workspace.recipe.seed}/{self.name}/{stage}/{task.id}"
        return Admission(
            trajectory_id=f"{group_id}/{attempt}",
            stage=self.name,
            group_id=group_id,
            group_index=index,
            member_index=0,
            attempt=attempt,
            task=task,
            policy_version=version,
            seed=int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:6]),
        )


def _results_so_far(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"cells": []}
    try:
        results: dict[str, Any] = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ContractError(
            f"{path} is damaged: {error}. Remove it, and its cells are evaluated again."
        ) from error
    return results


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return what a cell of the matrix says, excluded rollouts counted apart and never as failures.

    Args:
        trajectories: in the order of the tasks, so that other checkpoints can be compared task by task.
    """
    graded = [t for t in trajectories if t.reward is not None]
    solved = [t for t in graded if t.reward is not None and t.reward >= 1.0]
    level_of = _levels({t.difficulty for t in graded})
    by_difficulty = {
        f"{level:g}": [
            sum(level_of(t.difficulty) == level for t in some) for some in (solved, graded)
        ]
        for level in sorted({level_of(t.difficulty) for t in graded})
    }
    rewards = [t.reward for t in graded if t.reward is not None]
    return {
        "num_graded": len(graded),
        "num_solved": len(solved),
        "num_excluded": len(trajectories) - len(graded),
        "solved": [None if t.reward is None else int(t.reward >= 1.0) for t in trajectories],
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "mean_turns": sum(t.num_turns for t in graded) / len(graded) if graded else None,
        "mean_sampled_tokens": (
            sum(t.num_sampled_tokens for t in graded) / len(graded) if graded else None
        ),
        "outcomes": dict(Counter(t.outcome.value for t in trajectories)),
        "by_difficulty": by_difficulty,
    }


def _levels(difficulties: Collection[float]) -> Callable[[float], float]:
    """Return what sorts difficulties into levels: themselves, or the lower ends of a few equal ranges."""
    if len(difficulties) <= MAX_LEVELS:
        return lambda difficulty: difficulty
    lowest, highest = min(difficulties), max(difficulties)
    width = 10.0 ** math.floor(math.log10((highest - lowest) or 1.0))
    while (highest - lowest) / width > MAX_LEVELS - 1:
        width *= 2
    return lambda difficulty: math.floor(difficulty / width) * width


def matrix_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the matrix as text: a row per checkpoint, a column per family, success in percent; then the changes."""
    families = sorted({cell["family"] for cell in cells})
    stages = list(dict.fromkeys(cell["stage"] for cell in cells))
    rates = {
        (cell["stage"], cell["family"]): 100.0 * cell["num_solved"] / cell["num_graded"]
        for cell in cells
        if cell["num_graded"]
    }
    width = max([len(stage) for stage in stages] + [10])
    lines = [" " * width + "".join(f"{family:>12}" for family in families)]
    for stage in stages:
        values = [rates.get((stage, family)) for family in families]
        lines.append(
            f"{stage:<{width}}"
            + "".join(f"{'-':>12}" if value is None else f"{value:>11.1f}%" for value in values)
        )
    return [*lines, *_change_lines(cells, stages, families)]


def run_lines(run: RunDirectory) -> list[str]:
    """Return the matrix of every evaluation of a run's recipe as text; not those that were asked for by hand.

    Raises:
        ContractError: a file of results is damaged.
    """
    stages = run.recipe()["stages"]
    return [
        line
        for name, cells in read_evaluations(run).items()
        if name in stages
        for line in matrix_lines(cells)
    ]


def _change_lines(
    cells: Sequence[dict[str, Any]], stages: Sequence[str], families: Sequence[str]
) -> list[str]:
    """Return the changes from each checkpoint to the next, task by task; nothing where no tasks can be paired."""
    solved = {(cell["stage"], cell["family"]): cell.get("solved", []) for cell in cells}
    lines = []
    for before, after in pairwise(stages):
        for family in families:
            pair = solved.get((before, family), []), solved.get((after, family), [])
            if len(pair[0]) != len(pair[1]) or (change := paired_difference(*pair)) is None:
                continue
            low, middle, high = (
                100.0 * part for part in (change.low, change.difference, change.high)
            )
            lines.append(
                f"{family}: {before} to {after} {middle:+.1f} points, 95 % [{low:+.1f}, {high:+.1f}], "
                f"{change.num_gained} gained and {change.num_lost} lost of {change.num_pairs} tasks"
            )
    return ["", "on the same tasks:", *lines] if lines else []
