"""What one setting asks of another one, far away in the recipe: refused before hours are spent on it."""

import re
from collections.abc import Iterable, Iterator, Mapping

from longarc.config.engine import EngineConfig
from longarc.config.model import AttentionPattern, GlmMoeDsaConfig, ModelConfig
from longarc.config.stages import (
    DistillConfig,
    DsaConfig,
    EvalConfig,
    MidtrainConfig,
    PretrainConfig,
    RlConfig,
    StageConfig,
    SupervisedConfig,
)
from longarc.config.training import ActivationConfig, chosen_layers

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_RESERVED = re.compile(r"initial|serve|eval-\d+")
"""What the pipeline itself calls imported weights, served sessions and ``longarc eval``."""


def check_names(what: str, names: Iterable[str]) -> None:
    """Refuse names of stages or families that cannot be a part of file names and ids.

    Raises:
        ValueError: names it.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{what} {name!r}: it becomes part of file names and ids; use letters, digits, "
                f"'_', '-' and '.', and no '.' or '-' in front"
            )
        if what == "stage" and _RESERVED.fullmatch(name):
            raise ValueError(
                f"stage {name!r}: initial, serve and eval-NUMBER are names that LongArc itself uses "
                f"in a run; choose another one"
            )


def check_model_fits(model: ModelConfig, stages: Mapping[str, StageConfig]) -> None:
    """Refuse stages that the model of the recipe cannot do.

    Raises:
        ValueError: names the stage, the values and what to change.
    """
    longest = model.max_position_embeddings
    hybrid: str | None = None
    for name, stage in stages.items():
        for key, num_tokens in _contexts(stage):
            if num_tokens > longest:
                raise ValueError(
                    f"stage {name!r}: {key}={num_tokens} exceeds model.max_position_embeddings="
                    f"{longest}; lower it or raise model.max_position_embeddings"
                )
        if not isinstance(stage, EvalConfig):
            _check_activations(name, model, stage.activations)
        if isinstance(stage, SupervisedConfig):
            _check_int4(name, model, stage.int4_group_size)
        if isinstance(stage, MidtrainConfig) and stage.pattern is not None:
            _check_pattern(name, model, stage.pattern)
            hybrid = name
        if isinstance(stage, DsaConfig) and hybrid is not None:
            raise ValueError(
                f"stage {name!r} converts to sparse attention, but stage {hybrid!r} has replaced the model's "
                f"attention by a pattern without indexers; remove one of the two"
            )
        if isinstance(stage, DsaConfig) and model.family != "glm_moe_dsa":
            raise ValueError(
                f"stage {name!r} converts to sparse attention, but a {model.family} model has no "
                f"indexer; remove the stage or use model.family = 'glm_moe_dsa'"
            )


def _check_activations(name: str, model: ModelConfig, activations: ActivationConfig) -> None:
    for key in ("recomputed_layers", "offloaded_layers"):
        try:
            chosen_layers(getattr(activations, key), model.num_hidden_layers)
        except ValueError as error:
            raise ValueError(f"stage {name!r}: activations.{key}: {error}") from error


def _check_pattern(name: str, model: ModelConfig, pattern: AttentionPattern) -> None:
    if len(pattern.layers) != model.num_hidden_layers:
        raise ValueError(
            f"stage {name!r}: pattern.layers={pattern.layers!r} names {len(pattern.layers)} layers, but "
            f"model.num_hidden_layers={model.num_hidden_layers}; give one letter a layer"
        )


def _check_int4(name: str, model: ModelConfig, group_size: int | None) -> None:
    if group_size is None:
        return
    has_experts = isinstance(model, GlmMoeDsaConfig)
    if not has_experts:
        raise ValueError(
            f"stage {name!r}: int4_group_size={group_size} rounds routed experts, but a {model.family} "
            f"model has none; leave it out or use model.family = 'glm_moe_dsa'"
        )
    for key in ("hidden_size", "moe_intermediate_size"):
        width = getattr(model, key)
        if width % group_size:
            raise ValueError(
                f"stage {name!r}: int4_group_size={group_size} does not divide model.{key}={width}; "
                f"choose one that divides both widths of an expert"
            )


def check_engine_fits(engine: EngineConfig, stages: Mapping[str, StageConfig]) -> None:
    """Refuse stages that start more rollouts than the engine takes requests.

    Raises:
        ValueError: names the stage, the values and what to change.
    """
    room = engine.max_running + engine.max_waiting
    for name, stage in stages.items():
        if isinstance(stage, RlConfig | DistillConfig):
            key, wanted = "loop.max_concurrent_rollouts", stage.loop.max_concurrent_rollouts
        elif isinstance(stage, EvalConfig):
            key, wanted = "max_concurrent_rollouts", stage.max_concurrent_rollouts
        else:
            continue
        if wanted > room:
            raise ValueError(
                f"stage {name!r}: {key}={wanted} is more than the engine takes: "
                f"engine.max_running={engine.max_running} + engine.max_waiting={engine.max_waiting}. "
                f"Lower it or raise engine.max_waiting"
            )


def _contexts(stage: StageConfig) -> Iterator[tuple[str, int]]:
    if isinstance(stage, PretrainConfig | MidtrainConfig | DsaConfig):
        yield "context_tokens", stage.context_tokens
    elif isinstance(stage, RlConfig | DistillConfig | EvalConfig):
        yield "rollout.max_context_tokens", stage.rollout.max_context_tokens
