"""Takes a recorded step again from the checkpoint before it, and compares the weights bit for bit."""

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

from longarc.config.recipe import INITIAL, Recipe
from longarc.config.rollout import takes_turns
from longarc.errors import CheckpointError, ConfigError
from longarc.pipeline.trainer_factory import SamplingStage, TrainerSpec, build_trainer, trainer_spec
from longarc.pipeline.workspace import TOKENIZER_FILE
from longarc.records.batch import StepReport
from longarc.runs.checkpoint import read_manifest
from longarc.runs.directory import RunDirectory
from longarc.trainer.data_parallel import GradientPool


def replay_step(recipe: Recipe, run_dir: Path, where: str) -> tuple[StepReport, StepReport]:
    """Recompute one recorded step.

    Starts from the newest checkpoint at or before the step and takes every recorded step from there on
    again, the asked one last. Nothing in the run directory is changed.

    Args:
        recipe: the run's recipe.
        run_dir: the run.
        where: ``STAGE:STEP``, or ``STEP`` where the recipe has one RL stage; steps count from 0.

    Returns:
        What the run recorded, and what was computed now.

    Raises:
        ConfigError: there is no such stage or step.
        CheckpointError: the checkpoints before the step are gone.
    """
    stage, step = _parse(recipe, where)
    run = RunDirectory.look(run_dir)
    with run.read_ledger() as ledger, TemporaryDirectory() as scratch:
        num_steps = len(ledger.steps(stage))
        if not 0 <= step < num_steps:
            raise ConfigError(
                f"stage {stage!r} of {run_dir} has {num_steps} recorded steps, 0 to {num_steps - 1}; {step} is not one"
            )
        config = recipe.stages[stage]
        assert isinstance(config, SamplingStage)
        start, spec = _start(recipe, config, run, stage, step, scratch)
        with contextlib.closing(GradientPool(recipe.threads)) as pool:
            # As many processes as in the run: their sums are added in that order.
            trainer = build_trainer(spec, gradients=pool.open if takes_turns(config) else None)
            for earlier in range(start, step):
                trainer.take_step(ledger.batch(stage, earlier))
            return ledger.report(stage, step), trainer.take_step(ledger.batch(stage, step))


def _parse(recipe: Recipe, where: str) -> tuple[str, int]:
    rl_stages = [n for n, c in recipe.stages.items() if isinstance(c, SamplingStage)]
    stage, separator, number = where.rpartition(":")
    if not separator and len(rl_stages) == 1:
        stage = rl_stages[0]
    if stage not in rl_stages or not number.isdecimal():
        raise ConfigError(
            f"--replay {where!r}: write STAGE:STEP with one of the stages {rl_stages}, e.g. "
            f"{rl_stages[0] if rl_stages else 'agentic_rl'}:3"
        )
    return stage, int(number)


def _start(
    recipe: Recipe,
    config: SamplingStage,
    run: RunDirectory,
    stage: str,
    step: int,
    scratch: str,
) -> tuple[int, TrainerSpec]:
    names = list(recipe.stages)
    earlier = [n for n in names[: names.index(stage)] if recipe.stages[n].kind != "eval"]
    before = earlier[-1] if earlier else INITIAL
    first = run.stage(before).final()
    if first is None:
        raise CheckpointError(
            f"stage {before!r} of {run.path} has no final checkpoint to start from; copy the run again from "
            f"where it was made"
        )
    usable = [c for c in run.stage(stage).checkpoints() if read_manifest(c).step <= step]

    def final(named: str) -> Path:
        checkpoint = run.stage(named).final()
        if checkpoint is None:
            raise CheckpointError(
                f"stage {named!r} has no final checkpoint; copy the run again from where it was made"
            )
        return checkpoint

    tokenizer = run.path / TOKENIZER_FILE
    spec = trainer_spec(
        recipe,
        config,
        input_checkpoint=first,
        resume_checkpoint=usable[-1] if usable else None,
        publish_directory=Path(scratch),
        tokenizer=tokenizer if tokenizer.exists() else None,
        final=final,
    )
    return (read_manifest(usable[-1]).step if usable else 0), spec
