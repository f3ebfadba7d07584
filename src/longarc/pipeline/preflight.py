"""Looks, before the first stage, for what would stop a later one: user code and files that a recipe names.

An hour of training is a bad moment to learn that the loss of the next stage is misspelt.
"""

import inspect
from pathlib import Path

from longarc.algos.protocols import PolicyLoss
from longarc.config.load_object import load_object
from longarc.config.stages import DistillConfig, EvalConfig, LossConfig, RlConfig, SftConfig
from longarc.data.sft import Expert
from longarc.errors import ConfigError
from longarc.pipeline.workspace import Workspace, check_fits
from longarc.tokens.tokenizer import Tokenizer


def check_recipe(workspace: Workspace) -> None:
    """Load what the recipe names by path, for every stage that is not finished.

    Raises:
        ConfigError: an import path, a family's or a loss's settings, or the tokenizer is wrong.
    """
    recipe = workspace.recipe
    if recipe.tokenizer.path is not None and not workspace.tokenizer_path.exists():
        tokenizer = Tokenizer.load(Path(recipe.tokenizer.path))
        if recipe.initial is None:
            check_fits(tokenizer, recipe.model)
    for name, stage in recipe.stages.items():
        if workspace.run.stage(name).final() is not None:
            continue
        if isinstance(stage, SftConfig | RlConfig | DistillConfig | EvalConfig):
            families = workspace.families(stage.tasks)
            if isinstance(stage, SftConfig):
                for family_name, family in families.items():
                    expert(name, family_name, family)
        if isinstance(stage, RlConfig | DistillConfig):
            _check_loss(name, stage.loss)


def expert(stage: str, family_name: str, family: object) -> Expert:
    """Return a family as one that shows how it is done.

    Raises:
        ConfigError: it does not.
    """
    if not isinstance(family, Expert):
        raise ConfigError(
            f"stage {stage!r}: family {family_name!r} has no demonstration(index, error_frac=...) to "
            f"imitate; remove it from the stage's tasks or add the method"
        )
    return family


def _check_loss(stage: str, config: LossConfig) -> None:
    loss: PolicyLoss = load_object(config.path, kind=PolicyLoss)
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return  # compiled code has none; a wrong setting will show at the first step
    try:
        signature.bind(None, **config.settings)
    except TypeError as error:
        raise ConfigError(
            f"stage {stage!r}: loss {config.path!r} does not take settings {config.settings}: {error}. "
            f"Its signature is {signature}"
        ) from error
