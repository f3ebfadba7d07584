"""Looks, before the first stage, for what would stop a later one: user code and files that a recipe names.

An hour of training is a bad moment to learn that the loss of the next stage is misspelt.
"""

import os
import pickle
from pathlib import Path

from longarc.algos.protocols import PolicyLoss
from longarc.config.cache_rounding import check_can_round_cache
from longarc.config.coherence import check_model_fits
from longarc.config.drafts import check_can_draft
from longarc.config.engine_clients import servers_of
from longarc.config.model import ModelConfig
from longarc.config.recipe import InitialCheckpoint, Recipe
from longarc.config.stages import (
    DistillConfig,
    EvalConfig,
    RlConfig,
    SftConfig,
    takes_turns,
)
from longarc.config.transformers_model import TransformersConfig
from longarc.data.sft import Expert
from longarc.errors import ConfigError, ResourceError, boundary
from longarc.models.backbones.classes import check_all_is_read, transformers_config
from longarc.models.build import build_without_memory
from longarc.models.hf_config import computing_in
from longarc.models.hf_files import TensorFiles
from longarc.models.hf_weights import pretrained_config
from longarc.models.offload import check_directory
from longarc.pipeline.loss_trial import check_loss
from longarc.pipeline.memory_needs import check_stages_fit
from longarc.pipeline.workspace import check_fits, family_object, rollout_family
from longarc.tokens.tokenizer import Tokenizer


def check_recipe(recipe: Recipe, *, is_new: bool) -> None:
    """Load what the recipe names by path, before a run directory is made for it.

    Args:
        recipe: the recipe.
        is_new: whether the run starts; a run that goes on has its own copy of the tokenizer.

    Raises:
        ConfigError: an import path, or a family's or a loss's settings are wrong, or the tokenizer
            is missing or does not fit the model, or the model to start from cannot do a stage.
        CheckpointError: the tokenizer is damaged, or there is no model where ``initial.path`` says.
        ResourceError: the machine has fewer cores than the recipe uses at once, or no memory for the weights, or a
            stage's ``activations.offload_directory`` does not exist, is not writable or lies in memory.
    """
    _check_cores(recipe)
    _check_offloading(recipe)
    _check_engine(recipe)
    if is_new:
        _check_start(recipe)
    for name, stage in recipe.stages.items():
        if isinstance(stage, SftConfig | RlConfig | DistillConfig | EvalConfig):
            for family_name, share in stage.tasks.items():
                if isinstance(stage, SftConfig):
                    expert(name, family_name, family_object(recipe, family_name, share))
                else:
                    rollout_family(recipe, family_name, share)
        elif stage.demonstrations is not None:
            for family_name, share in stage.demonstrations.tasks.items():
                expert(name, family_name, family_object(recipe, family_name, share))
        if isinstance(stage, RlConfig | DistillConfig):
            loss = check_loss(name, stage)
            if recipe.threads > 1 and takes_turns(stage):
                _check_can_be_shared(name, stage.loss.path, loss)


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


def _check_cores(recipe: Recipe) -> None:
    """Refuse more compute threads than cores: two threads on one core are many times slower than one."""
    cores = len(os.sched_getaffinity(0))
    wanted = {"threads": recipe.threads}
    if any(
        isinstance(stage, RlConfig | DistillConfig) and stage.trainer_process
        for stage in recipe.stages.values()
    ):
        beside = 0 if servers_of(recipe.engine) else recipe.engine.num_threads
        what = "engine.num_threads + trainer_threads" if beside else "trainer_threads"
        wanted[what] = beside + recipe.trainer_threads
    for what, number in wanted.items():
        if number > cores:
            raise ResourceError(
                f"{what} = {number}, but this process may use {cores} core(s); lower it, for example with "
                f"--set threads=1, or give the run more cores"
            )


def _check_engine(recipe: Recipe) -> None:
    """Refuse an interpreter that is not there before a stage has trained for hours on the way to it."""
    python = getattr(recipe.engine, "python", None)
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(
            f"engine.python = {python!r} is no program; name the interpreter of an environment that has "
            f"{recipe.engine.kind}, for example .venv-vllm/bin/python (scripts/setup_vllm.sh)"
        )


def _check_offloading(recipe: Recipe) -> None:
    for name, stage in recipe.stages.items():
        if isinstance(stage, EvalConfig) or stage.activations.offloaded_layers == "none":
            continue
        try:
            check_directory(stage.activations.offload_directory)
        except ResourceError as error:
            raise ResourceError(f"stage {name!r}: {error}") from error


def _check_start(recipe: Recipe) -> None:
    tokenizer, model = None, None
    if recipe.tokenizer.path is not None:
        tokenizer = _tokenizer(Path(recipe.tokenizer.path))
    if recipe.initial is not None:
        model = _check_initial(recipe, recipe.initial)
        if tokenizer is not None:
            check_fits(tokenizer, model, is_given=True)
    elif tokenizer is not None:
        check_fits(tokenizer, recipe.model)
    if recipe.initial is None and isinstance(recipe.model, TransformersConfig):
        check_all_is_read(recipe.model)  # and refuses what transformers does not build
    check_stages_fit(recipe, build_without_memory(recipe.model if model is None else model))


def _tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise ConfigError(
            f"tokenizer.path = {str(path)!r} does not exist; name a tokenizer.json or a directory "
            f"that holds one"
        )
    return Tokenizer.load(path)


def _check_initial(recipe: Recipe, initial: InitialCheckpoint) -> ModelConfig:
    """Refuse a directory without weights, and stages that its model cannot do; return what it holds."""
    model = computing_in(pretrained_config(initial.path), initial.compute_dtype)
    with TensorFiles.of_directory(Path(initial.path)):
        pass  # the files are there, and as long as they say
    if initial.is_sparse and model.family != "glm_moe_dsa":
        raise ConfigError(
            f"initial.is_sparse=true, but {initial.path} holds a {model.family} model, which has no sparse "
            f"attention; leave it out"
        )
    if isinstance(model, TransformersConfig):
        transformers_config(model)  # refuses what transformers does not build
    try:
        check_model_fits(model, recipe.stages, is_given=True)
        check_can_draft(recipe.engine, model, recipe.stages)
        check_can_round_cache(recipe.engine, model, recipe.stages)
    except ValueError as error:
        raise ConfigError(f"initial.path = {initial.path!r}: {error}") from error
    return model


def _check_can_be_shared(stage: str, path: str, loss: PolicyLoss) -> None:
    """Refuse a loss that the other processes of a step could not find."""
    hint = "give it a name of its own at the top of its module, or set threads = 1"
    with boundary(
        ConfigError, f"stage {stage!r}: loss {path!r} cannot go to other processes; {hint}"
    ):
        pickle.dumps(loss)
