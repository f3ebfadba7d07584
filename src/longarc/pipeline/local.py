"""Runs a recipe on this machine, stage after stage, and goes on where an earlier start stopped."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longarc.config.critic import ValuePretrainConfig
from longarc.config.recipe import Recipe
from longarc.config.recorded import read_recorded
from longarc.config.rollout import SamplingStageConfig, takes_turns
from longarc.config.stages import (
    DistillConfig,
    DsaConfig,
    EvalConfig,
    MidtrainConfig,
    MtpConfig,
    PretrainConfig,
    RlConfig,
    SftConfig,
    StageConfig,
    SupervisedConfig,
)
from longarc.errors import CheckpointError, ConfigError
from longarc.pipeline import (
    agentic_rl,
    distill,
    dsa,
    evaluation,
    general_rl,
    midtrain,
    mtp,
    pretrain,
    reasoning_rl,
    sft,
    value_pretrain,
)
from longarc.pipeline.progress import ProgressLine
from longarc.pipeline.signals import stopping_on_signals
from longarc.pipeline.workspace import Interrupted, Workspace
from longarc.runs.directory import RECIPE, RunDirectory
from longarc.runs.metrics import open_sinks
from longarc.trainer.data_parallel import GradientPool

_RL_STAGES = {
    "reasoning_rl": reasoning_rl.run,
    "agentic_rl": agentic_rl.run,
    "general_rl": general_rl.run,
}


@contextlib.contextmanager
def open_workspace(
    recipe: Recipe, run_dir: Path, *, resume: bool, progress: ProgressLine
) -> Iterator[Workspace]:
    """Open a run for writing: its directory, ledger, sinks and processes; all are closed afterwards.

    A new run that ends with an error of its recipe or of the files that it names, before there is any result,
    leaves no run behind.
    """
    content, seeds = recipe.model_dump(mode="json"), {"run": recipe.seed}
    opened = (
        RunDirectory.resume(run_dir, recipe=content, seeds=seeds, read=_read_by_this_version)
        if resume
        else RunDirectory.create(run_dir, recipe=content, seeds=seeds)
    )
    with opened as run:
        try:
            with _open_parts(recipe, run, progress=progress) as workspace:
                yield workspace
        except (ConfigError, CheckpointError):
            # What the recipe names is wrong: with the fix the same command has to work.
            if not resume:
                run.discard_unused()
            raise


@contextlib.contextmanager
def _open_parts(
    recipe: Recipe, run: RunDirectory, *, progress: ProgressLine
) -> Iterator[Workspace]:
    with contextlib.ExitStack() as parts:
        ledger = parts.enter_context(contextlib.closing(run.open_ledger()))
        sink = open_sinks(
            run.path, recipe.sinks, run_name=recipe.name, recipe=recipe.model_dump(mode="json")
        )
        parts.callback(sink.close)
        gradients = parts.enter_context(contextlib.closing(GradientPool(recipe.threads)))
        yield Workspace(
            recipe=recipe,
            run=run,
            ledger=ledger,
            sink=sink,
            progress=progress,
            gradients=gradients,
            stop=asyncio.Event(),
        )


def _read_by_this_version(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    return read_recorded(recorded, source=RECIPE).recipe.model_dump(mode="json")


async def run_recipe(workspace: Workspace) -> None:
    """Run every stage that is not finished.

    Raises:
        Interrupted: SIGINT or SIGTERM came; everything is saved.
    """
    with stopping_on_signals(workspace.stop):
        for name, config in workspace.recipe.stages.items():
            workspace.check_stop()
            if config.kind != "eval" and workspace.run.stage(name).final() is not None:
                continue
            if _shares_gradients(config):
                workspace.gradients.start()  # they load while this process reads what the stage needs
            else:
                workspace.gradients.close()  # cores and memory are for engine, trainer and sandboxes
            started_s = time.monotonic()
            workspace.run.event("stage_started", stage=name, stage_kind=config.kind)
            try:
                await run_stage(workspace, name, config)
            finally:
                # Also when cut off: the report adds up what every start spent.
                workspace.run.event(
                    "stage_ended", stage=name, elapsed_s=time.monotonic() - started_s
                )


def _shares_gradients(config: StageConfig) -> bool:
    """Say whether the gradients of a step may have all cores."""
    if isinstance(config, SamplingStageConfig):
        return takes_turns(config)
    return isinstance(config, SupervisedConfig)


async def run_stage(workspace: Workspace, name: str, config: StageConfig) -> None:
    """Run one stage."""
    match config:
        case PretrainConfig():
            await pretrain.run(workspace, name, config)
        case MidtrainConfig():
            await midtrain.run(workspace, name, config)
        case DsaConfig():
            await dsa.run(workspace, name, config)
        case SftConfig():
            await sft.run(workspace, name, config)
        case MtpConfig():
            await mtp.run(workspace, name, config)
        case ValuePretrainConfig():
            await value_pretrain.run(workspace, name, config)
        case RlConfig():
            await _RL_STAGES[config.kind](workspace, name, config)
        case DistillConfig():
            await distill.run(workspace, name, config)
        case EvalConfig():
            await evaluation.run(workspace, name, config)


__all__ = ["Interrupted", "open_workspace", "run_recipe", "run_stage", "stopping_on_signals"]
