"""The final checkpoint of a stage that somebody names, of a run that is only looked at."""

from pathlib import Path

from longarc.config.recipe import INITIAL, Recipe
from longarc.errors import CheckpointError, ConfigError
from longarc.runs.directory import RunDirectory


def final_checkpoint(recipe: Recipe, run: RunDirectory, stage: str) -> Path:
    """Return the final checkpoint of a stage.

    Args:
        recipe: of the run.
        run: holds the checkpoints.
        stage: a training stage, or ``initial`` for the weights that the recipe starts from.

    Raises:
        ConfigError: the recipe has no such training stage.
        CheckpointError: the stage is not finished, or its record is damaged.
    """
    trained = [] if recipe.initial is None else [INITIAL]
    trained += [name for name, config in recipe.stages.items() if config.kind != "eval"]
    if stage not in trained:
        why = (
            "evaluates and has no weights of its own"
            if stage in recipe.stages
            else "does not exist"
        )
        raise ConfigError(
            f"stage {stage!r} of {run.path} {why}; name one of the training stages {trained}"
        )
    checkpoint = run.stage(stage).final()
    if checkpoint is None:
        finished = [name for name in trained if run.stage(name).final() is not None]
        raise CheckpointError(
            f"stage {stage!r} of {run.path} is not finished: it has no final checkpoint. Finished are "
            f"{finished}; name one of them, or resume the run first"
        )
    return checkpoint
