"""Asynchronous against synchronous agentic RL on ``files`` with a heavy tail of long trails, in one run.

Every arm starts from the same checkpoint of a finished run, which is only read, and takes the same number of
optimizer steps over the same number of groups with the same loss:

* asynchronous: the trainer in a process of its own, one thread for it and one for the engine; groups are
  trained as they get ready, at most ``--max-lag`` steps old.
* synchronous: on-policy, engine and trainer take turns; with one thread and with two, and the better
  of the two is the peer.

All of it once with the tools of the box, which answer in milliseconds, and once with a wait before each
command, as of a remote or heavy tool: log-normal, its median from ``--command-wait`` (heavy_tail.py).
Waits cost no core; whoever has nothing else to do while one lasts loses that time.

Trained tokens/s are all trained tokens over the time from the first rollout to the last step. Success is
measured on held-out tasks of the same mixture with the final weights; its spread is the larger of both
ranges over the seeds, and asynchronous may be below synchronous by at most that.

Usage: python benchmarks/asynchronous.py [--run runs/quickstart] [--stage sft] [--seeds 0 1 2] [--quick]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Table, natural, positive

from longarc.config.engine import EngineConfig
from longarc.config.orchestrator import RolloutLoopConfig
from longarc.config.recipe import InitialCheckpoint, Recipe, TaskFamilyConfig, TokenizerConfig
from longarc.config.rollout import RolloutConfig, TaskShare
from longarc.config.stages import EvalConfig, LossConfig, RlConfig, StageConfig
from longarc.config.training import OptimizerConfig
from longarc.errors import LongArcError
from longarc.models.hf_weights import save_pretrained_dir
from longarc.pipeline.evaluation import RESULTS_FILE
from longarc.pipeline.local import open_workspace, run_recipe
from longarc.pipeline.progress import ProgressLine
from longarc.pipeline.workspace import TOKENIZER_FILE, load_checkpoint
from longarc.runs.directory import RunDirectory
from longarc.runs.metrics import read_metrics

BAR = 1.3
SLOW_COMMAND_S = 0.05
"""Median wait of a slow tool [seconds]; with the tail of heavy_tail.py the mean is 0.15, one in a hundred
above 1.6. Rollouts here take a few seconds, a thousandth of real ones, and so do their tools."""
FAMILY = "files"
RL, EVAL = "agentic_rl", "eval"
ROLLOUT = RolloutConfig(max_new_tokens=64, max_context_tokens=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to schedule sampling against training."""

    name: str
    num_threads: int
    """Compute threads of the engine and as many of the trainer."""
    is_async: bool


ASYNC = Arm(name="async", num_threads=1, is_async=True)
SYNC = tuple(Arm(name=f"sync-{n}", num_threads=n, is_async=False) for n in (1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run of an arm gave."""

    tokens_per_s: float
    success_frac: float
    num_tokens: int
    mean_lag_steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The checkpoint that all arms start from, as Hugging Face files."""

    model: Path
    tokenizer: Path
    chat_format: str
    is_sparse: bool


def export(run_dir: Path, stage: str, directory: Path) -> Start:
    """Copy a stage's final checkpoint out of its run.

    Raises:
        LongArcError: there is no such run, or the stage is not finished.
    """
    run = RunDirectory.look(run_dir)
    final = run.stage(stage).final()
    if final is None:
        raise LongArcError(f"stage {stage!r} of {run_dir} is not finished; it has {run.stages()}")
    loaded = load_checkpoint(final)
    save_pretrained_dir(loaded.model, directory)
    return Start(
        model=directory,
        tokenizer=run_dir / TOKENIZER_FILE,
        chat_format=str(loaded.manifest.info["chat_format"]),
        is_sparse=loaded.attention == "sparse",
    )


def make_recipe(
    start: Start, arm: Arm, options: argparse.Namespace, *, wait_s: float, seed: int
) -> Recipe:
    """Write down one arm: RL from the checkpoint, then an evaluation of what came out."""
    loop = RolloutLoopConfig(
        num_steps=options.steps,
        groups_per_step=options.groups,
        group_size=options.group_size,
        max_lag_steps=options.max_lag if arm.is_async else 0,
        consume="ready" if arm.is_async else "admission",
        max_concurrent_rollouts=128,
        dynamic_sampling=False,
    )
    share = {FAMILY: TaskShare()}
    stages: dict[str, StageConfig] = {
        RL: RlConfig(
            kind="agentic_rl",
            tasks=share,
            loop=loop,
            rollout=ROLLOUT,
            loss=LossConfig(
                path="longarc.algos.losses:double_sided", settings={"low": 0.2, "high": 4.0}
            ),
            # As in recipes/quickstart.toml: the rate falls, so that the last steps do not decide about success.
            optimizer=OptimizerConfig(
                lr=options.lr, momentum=0.8, schedule="cosine", weight_decay=0.0
            ),
            trainer_process=arm.is_async,
            checkpoint_every_steps=options.steps,
        ),
        EVAL: EvalConfig(
            stages=[RL], tasks=share, tasks_per_family=options.eval_tasks, rollout=ROLLOUT
        ),
    }
    return Recipe(
        name=f"{arm.name}-{wait_s:g}-{seed}",
        seed=seed,
        initial=InitialCheckpoint(path=str(start.model), is_sparse=start.is_sparse),
        tokenizer=TokenizerConfig.model_validate(
            {"path": str(start.tokenizer), "chat_format": start.chat_format}
        ),
        engine=EngineConfig(num_threads=arm.num_threads),
        trainer_threads=arm.num_threads,
        threads=arm.num_threads,
        sinks=(),
        tasks={
            FAMILY: TaskFamilyConfig(
                path="heavy_tail:HeavyTailedFiles", settings={"command_wait_s": wait_s}
            )
        },
        stages=stages,
    )


def run_arm(recipe: dict[str, Any], run_dir: Path) -> Result:
    """Run one arm from start to end; called in a process of its own."""
    parsed = Recipe.model_validate(recipe)
    progress = ProgressLine(sys.stderr)
    with open_workspace(parsed, run_dir, resume=False, progress=progress) as workspace:
        asyncio.run(run_recipe(workspace))
        rows = [row.values for row in read_metrics(workspace.run.metrics_path) if row.stage == RL]
        results = json.loads((workspace.run.stage(EVAL).path / RESULTS_FILE).read_bytes())
    num_tokens = sum(row["loop/trained_tokens"] for row in rows)
    (cell,) = results["cells"]
    return Result(
        tokens_per_s=num_tokens / sum(row["loop/step_s"] for row in rows),
        success_frac=cell["num_solved"] / cell["num_graded"],
        num_tokens=round(num_tokens),
        mean_lag_steps=statistics.mean(row["lag/mean_steps"] for row in rows),
    )


def run_all(
    start: Start, options: argparse.Namespace, scratch: Path, *, wait_s: float
) -> dict[str, dict[int, Result]]:
    """Run every arm with every seed, the arms in turns."""
    results: dict[str, dict[int, Result]] = {arm.name: {} for arm in (*SYNC, ASYNC)}
    context = multiprocessing.get_context("spawn")
    for seed in options.seeds:
        for arm in (*SYNC, ASYNC):
            recipe = make_recipe(start, arm, options, wait_s=wait_s, seed=seed).model_dump(
                mode="json"
            )
            # A new process each: no arm inherits another's threads, memory or native state.
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                result = pool.submit(run_arm, recipe, scratch / recipe["name"]).result()
            results[arm.name][seed] = result
            print(
                f"{arm.name:<8} {tools(wait_s)}, seed {seed}: {result.tokens_per_s:.0f} trained tokens/s, "
                f"{result.num_tokens} tokens, mean lag {result.mean_lag_steps:.1f}, "
                f"success {result.success_frac:.1%}",
                flush=True,
            )
    return results


def tools(wait_s: float) -> str:
    """Say what the tools of a mixture are like."""
    return f"slow tools ({1000 * wait_s:g} ms)" if wait_s else "local tools"


def add_rows(table: Table, results: dict[str, dict[int, Result]], *, wait_s: float) -> None:
    """Add what one mixture gave."""
    speeds = {
        name: statistics.median(result.tokens_per_s for result in by_seed.values())
        for name, by_seed in results.items()
    }
    best = max((arm.name for arm in SYNC), key=lambda name: speeds[name])
    ours, peer = (
        [result.success_frac for result in results[name].values()] for name in (ASYNC.name, best)
    )
    mean_ours, mean_peer = statistics.mean(ours), statistics.mean(peer)
    spread = max(max(values) - min(values) for values in (ours, peer))
    has_spread = len(ours) > 1
    table.row(
        f"agentic RL, heavy-tailed files, {tools(wait_s)} [trained tokens/s], peer {best}",
        f"{speeds[ASYNC.name]:.0f}",
        peer=f"{speeds[best]:.0f}",
        ratio=speeds[ASYNC.name] / speeds[best],
        bar=f">= {BAR}",
        holds=speeds[ASYNC.name] >= BAR * speeds[best],
    )
    table.row(
        f"{tools(wait_s)}: final success on held-out tasks, mean of {len(ours)} seed(s), peer {best}",
        f"{mean_ours:.1%}",
        peer=f"{mean_peer:.1%}",
        bar=f"> 0, >= peer - {spread:.1%}" if has_spread else "needs 2 seeds",
        holds=has_spread and mean_ours > 0 and mean_ours >= mean_peer - spread,
    )
    for arm in SYNC:
        table.row(
            f"{tools(wait_s)}: {arm.name} [trained tokens/s]",
            f"{speeds[ASYNC.name]:.0f}",
            peer=f"{speeds[arm.name]:.0f}",
            ratio=speeds[ASYNC.name] / speeds[arm.name],
        )


def report_nothing(waits: list[float]) -> None:
    """Print the table of a machine without a run to start from: no bar holds."""
    table = Table()
    for wait_s in waits:
        for figure in ("agentic RL, heavy-tailed files [trained tokens/s]", "final success"):
            table.row(f"{tools(wait_s)}: {figure}", "not measured", bar="see above", holds=False)
    table.close()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; --quick makes everything small."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="a finished run")
    parser.add_argument("--stage", default="sft", help="whose final checkpoint all arms start from")
    parser.add_argument("--seeds", type=natural, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=positive, default=30, help="optimizer steps of each arm")
    parser.add_argument("--groups", type=positive, default=8, help="groups in one step")
    parser.add_argument("--group-size", type=positive, default=8, help="rollouts in one group")
    parser.add_argument(
        "--max-lag", type=natural, default=3, help="of the asynchronous arm [steps]"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument(
        "--command-wait",
        type=float,
        nargs="+",
        default=[0.0, SLOW_COMMAND_S],
        help="median wait before a command, one mixture each [seconds]",
    )
    parser.add_argument(
        "--eval-tasks", type=positive, default=256, help="held-out tasks for success"
    )
    parser.add_argument("--quick", action="store_true", help="two tiny steps: does it run at all?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.steps, options.groups = options.seeds[:1], 2, 2
        options.group_size, options.eval_tasks = 2, 4
    return options


def main() -> None:
    """Run every arm and print the table."""
    # Waiting threads must sleep, not spin, while another process has the core (docs/ARCHITECTURE.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options = parse()
    with tempfile.TemporaryDirectory(prefix="longarc-async-") as directory:
        scratch = Path(directory)
        try:
            start = export(options.run, options.stage, scratch / "model")
        except LongArcError as error:
            print(
                f"{error}\nThis benchmark starts from a finished run: `make quickstart` makes one."
            )
            report_nothing(options.command_wait)
            return
        results = {
            wait_s: run_all(start, options, scratch, wait_s=wait_s)
            for wait_s in options.command_wait
        }
    print(
        f"{options.steps} steps of {options.groups} x {options.group_size} rollouts, lag <= "
        f"{options.max_lag}, medians over seeds {options.seeds}, load average {os.getloadavg()[0]:.1f}"
    )
    table = Table()
    for wait_s, by_arm in results.items():
        add_rows(table, by_arm, wait_s=wait_s)
    table.close()


if __name__ == "__main__":
    main()
