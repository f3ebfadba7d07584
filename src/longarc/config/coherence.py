"""What one setting asks of another one, far away in the recipe: refused before hours are spent on it."""

import re
from collections.abc import Iterable, Iterator, Mapping

from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import (
    LEAST_VLLM_TEMPERATURE,
    SAMPLING_MASK_ARG,
    AnyEngineConfig,
    SglangConfig,
    VllmConfig,
    servers_of,
)
from longarc.config.index_share import check_sharing, kinds_of
from longarc.config.model import (
    AttentionPattern,
    GlmHybridConfig,
    GlmMoeDsaConfig,
    LlamaHybridConfig,
    ModelConfig,
)
from longarc.config.stages import (
    DistillConfig,
    DsaConfig,
    EvalConfig,
    MidtrainConfig,
    MtpConfig,
    PretrainConfig,
    RlConfig,
    RolloutConfig,
    SftConfig,
    StageConfig,
    SupervisedConfig,
    TextStageConfig,
)
from longarc.config.training import ActivationConfig, chosen_layers
from longarc.config.transformers_model import TransformersConfig, model_key
from longarc.config.transformers_stages import check_stage as check_transformers_stage

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


def check_model_fits(
    model: ModelConfig, stages: Mapping[str, StageConfig], *, is_given: bool = False
) -> None:
    """Refuse stages that the model of the recipe cannot do.

    Args:
        model: shape of the model.
        stages: of the recipe.
        is_given: whether a directory decides the shape, so that the recipe has no keys for it.

    Raises:
        ValueError: names the stage, the values and what to change.
    """
    longest = model.max_position_embeddings
    _check_mtp(model, stages)
    hybrid: str | None = None
    for name, stage in stages.items():
        for key, num_tokens in _contexts(stage):
            if num_tokens > longest:
                limit = model_key(model, "max_position_embeddings")
                raise ValueError(
                    f"stage {name!r}: {key}={num_tokens} exceeds the model's longest context of {longest}; lower it"
                    if is_given
                    else f"stage {name!r}: {key}={num_tokens} exceeds {limit}={longest}; lower it or raise {limit}"
                )
        if not isinstance(stage, EvalConfig):
            _check_activations(name, model, stage.activations)
        if isinstance(model, TransformersConfig):
            check_transformers_stage(name, model, stage)
        if isinstance(stage, SupervisedConfig):
            _check_int4(name, model, stage.int4_group_size)
        if isinstance(stage, MidtrainConfig) and stage.pattern is not None:
            _check_pattern(name, model, stage.pattern)
            hybrid = name
        if isinstance(stage, RlConfig | DistillConfig):
            _check_replay(name, model, stage.rollout, hybrid=hybrid)
        if isinstance(stage, DsaConfig):
            _check_conversion(name, model, stage, hybrid=hybrid)
            model = _with_pattern(model, stage.index_topk_pattern)


def _check_replay(
    name: str, model: ModelConfig, rollout: RolloutConfig, *, hybrid: str | None
) -> None:
    """Refuse to replay what the model does not choose."""
    asked = f"stage {name!r}: rollout.routing_replay={rollout.routing_replay!r}"
    if rollout.routing_replay == "none":
        return
    if not isinstance(model, GlmMoeDsaConfig) or isinstance(model, GlmHybridConfig) or hybrid:
        what = (
            f"a {model.family} model"
            if hybrid is None
            else f"the hybrid that stage {hybrid!r} makes"
        )
        raise ValueError(
            f"{asked} replays experts and selected keys, but {what} has none that are recorded; leave it out or use "
            f"model.family = 'glm_moe_dsa'"
        )
    if (
        rollout.routing_replay == "experts"
        and model.first_k_dense_replace >= model.num_hidden_layers
    ):
        raise ValueError(
            f"{asked}, but no layer has experts (model.first_k_dense_replace={model.first_k_dense_replace} of "
            f"model.num_hidden_layers={model.num_hidden_layers}); leave it out"
        )


def _check_conversion(
    name: str, model: ModelConfig, stage: DsaConfig, *, hybrid: str | None
) -> None:
    if hybrid is not None:
        raise ValueError(
            f"stage {name!r} converts to sparse attention, but stage {hybrid!r} has replaced the model's "
            f"attention by a pattern without indexers; remove one of the two"
        )
    try:
        check_is_sparse(model, stage.context_tokens)
    except ValueError as error:
        raise ValueError(f"stage {name!r}: {error}") from error
    if isinstance(model, GlmMoeDsaConfig):
        _check_sharing(name, model, stage.index_topk_pattern)


def _check_sharing(name: str, model: GlmMoeDsaConfig, pattern: str | None) -> None:
    if pattern is None:
        return
    try:
        check_sharing(model.indexer_kinds, kinds_of(pattern))
    except ValueError as error:
        raise ValueError(f"stage {name!r}: index_topk_pattern: {error}") from error


def _with_pattern(model: ModelConfig, pattern: str | None) -> ModelConfig:
    """Return the model that a conversion hands to the stages behind it."""
    if pattern is None:
        return model
    return model.model_copy(update={"index_topk_pattern": pattern, "indexer_types": None})


def _check_mtp(model: ModelConfig, stages: Mapping[str, StageConfig]) -> None:
    """Refuse drafts that nothing can make."""
    can_learn = isinstance(model, GlmMoeDsaConfig)
    can_draft = can_learn and bool(getattr(model, "num_nextn_predict_layers", 0))
    for name, stage in stages.items():
        if isinstance(stage, MtpConfig):
            if not can_learn:
                raise ValueError(
                    f"stage {name!r} trains multi-token prediction, which a {model.family} model does not "
                    f"have; remove the stage or use model.family = 'glm_moe_dsa'"
                )
            can_draft = True
        elif (
            isinstance(stage, TextStageConfig | SftConfig)
            and stage.mtp is not None
            and not can_draft
        ):
            raise ValueError(
                f"stage {name!r}: mtp trains a layer that the model does not have yet; set "
                f"model.num_nextn_predict_layers = 1 (model.family = 'glm_moe_dsa'), or leave mtp out"
            )


def check_keys_are_selected(stages: Mapping[str, StageConfig], *, is_sparse: bool) -> None:
    """Refuse to replay selected keys where attention reads all of them.

    Args:
        stages: of the recipe.
        is_sparse: whether what it starts from attends sparsely.

    Raises:
        ValueError: names the stage and what to change.
    """
    for name, stage in stages.items():
        is_sparse |= isinstance(stage, DsaConfig)
        if not isinstance(stage, RlConfig | DistillConfig) or is_sparse:
            continue
        if stage.rollout.routing_replay == "experts_and_keys":
            raise ValueError(
                f"stage {name!r}: rollout.routing_replay='experts_and_keys', but the model attends to every key there; "
                f"put a dsa stage before it (or initial.is_sparse = true), or replay 'experts'"
            )


def check_is_sparse(model: ModelConfig, context_tokens: int) -> None:
    """Refuse a conversion to sparse attention that has nothing to convert, or nothing to leave out.

    Raises:
        ValueError: names the values and what to change.
    """
    if model.family != "glm_moe_dsa":
        raise ValueError(
            f"it converts to sparse attention, but a {model.family} model has no indexer; remove the stage "
            f"or use model.family = 'glm_moe_dsa'"
        )
    if model.index_topk >= context_tokens:
        raise ValueError(
            f"model.index_topk={model.index_topk} is not below context_tokens={context_tokens}, so every "
            f"query would attend to all its keys and the indexer would decide nothing; lower "
            f"model.index_topk, or raise context_tokens"
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


def check_engine_fits(
    engine: AnyEngineConfig, stages: Mapping[str, StageConfig], *, model: ModelConfig | None = None
) -> None:
    """Refuse stages that start more rollouts than the engine takes requests, or longer ones than its cache holds.

    Also those that sample from vLLM or SGLang in a way that these cannot, or a model that they do not build.

    Raises:
        ValueError: names the stage, the values and what to change.
    """
    if not isinstance(engine, EngineConfig):
        _check_client_can(engine, stages, model)
    room = engine.max_running + engine.max_waiting
    for name, stage in stages.items():
        if isinstance(stage, RlConfig | DistillConfig):
            on_update = stage.rollout.on_update
            if on_update is not None and not isinstance(engine, EngineConfig):
                raise ValueError(
                    f"stage {name!r}: rollout.on_update={on_update!r} is for LongArc's own engine; engine.kind="
                    f"{engine.kind!r} treats all sequences alike: set engine.on_update"
                )
            if servers_of(engine):
                continue  # their queues are their own; a full one pushes back
            key, wanted = "loop.max_concurrent_rollouts", stage.loop.max_concurrent_rollouts
        elif isinstance(stage, EvalConfig):
            key, wanted = "max_concurrent_rollouts", stage.max_concurrent_rollouts
        else:
            continue
        context = stage.rollout.max_context_tokens
        if isinstance(engine, EngineConfig) and context > engine.cache_tokens:
            raise ValueError(
                f"stage {name!r}: a sequence of rollout.max_context_tokens={context} does not fit a cache of "
                f"engine.cache_tokens={engine.cache_tokens}. Raise engine.cache_tokens or lower the context"
            )
        if wanted > room:
            raise ValueError(
                f"stage {name!r}: {key}={wanted} is more than the engine takes: "
                f"engine.max_running={engine.max_running} + engine.max_waiting={engine.max_waiting}. "
                f"Lower it or raise engine.max_waiting"
            )


def _check_client_can(
    engine: VllmConfig | SglangConfig,
    stages: Mapping[str, StageConfig],
    model: ModelConfig | None,
) -> None:
    mixed = "model.pattern" if isinstance(model, GlmHybridConfig | LlamaHybridConfig) else None
    for name, stage in stages.items():
        if isinstance(stage, MidtrainConfig) and stage.pattern is not None:
            mixed = f"stages.{name}.pattern"
        if not isinstance(stage, RlConfig | DistillConfig | EvalConfig):
            continue
        if mixed is not None:
            raise ValueError(
                f"stage {name!r}: engine.kind={engine.kind!r} cannot serve the hybrid that {mixed} makes of the "
                f"model, because it has no Hugging Face architecture; leave that out, or engine.kind"
            )
        lack = _lack_of_client(engine, stage.rollout)
        if lack is not None:
            raise ValueError(f"stage {name!r}: {lack}")


def _lack_of_client(engine: VllmConfig | SglangConfig, rollout: RolloutConfig) -> str | None:
    """Return what an engine from elsewhere cannot do of how a stage samples; None where it can do all."""
    truncated = {
        f"rollout.{name}": getattr(rollout, name)
        for name in ("top_p", "top_k", "min_p")
        if getattr(rollout, name) != RolloutConfig.model_fields[name].default
    }
    said = ", ".join(f"{name}={value}" for name, value in truncated.items())
    if truncated and isinstance(engine, SglangConfig):
        return (
            f"{said} cannot be sampled with engine.kind='sglang', which reports log-probabilities before tokens are "
            f"left out; leave it out, or use another engine"
        )
    if rollout.routing_replay != "none":
        return (
            f"rollout.routing_replay={rollout.routing_replay!r} needs an engine that records what tokens are routed to, "
            f"which LongArc asks of its own alone; leave it out with engine.kind={engine.kind!r}"
        )
    if isinstance(engine, SglangConfig):
        return None
    if truncated and engine.python is not None and SAMPLING_MASK_ARG not in engine.args:
        return (
            f"{said} needs to be told what each token was drawn from, which engine.kind='vllm' does with "
            f"engine.args={[SAMPLING_MASK_ARG]} (not its CPU build); add it, or sample with the temperature alone"
        )
    if 0 < rollout.temperature < LEAST_VLLM_TEMPERATURE:
        return (
            f"rollout.temperature={rollout.temperature} cannot be sampled with engine.kind='vllm', which takes 0 or "
            f"at least {LEAST_VLLM_TEMPERATURE}"
        )
    return None


def _contexts(stage: StageConfig) -> Iterator[tuple[str, int]]:
    if isinstance(stage, PretrainConfig | MidtrainConfig | DsaConfig | MtpConfig):
        yield "context_tokens", stage.context_tokens
    elif isinstance(stage, RlConfig | DistillConfig | EvalConfig):
        yield "rollout.max_context_tokens", stage.rollout.max_context_tokens
