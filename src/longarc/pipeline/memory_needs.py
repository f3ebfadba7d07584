"""What each stage of a recipe needs of the memory, added up before the first one begins.

Two sums: what a stage takes for certain, and what it may take on top when rollouts fill the engine's cache and
micro-batches are as long as they may be. The first one decides, the second one is a warning. Both are from below: code,
torch's own buffers and the processes of environments are not counted.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import servers_of
from longarc.config.model import GlmMoeDsaConfig
from longarc.config.recipe import Recipe
from longarc.config.stages import (
    DistillConfig,
    EvalConfig,
    MtpConfig,
    RlConfig,
    StageConfig,
    TextStageConfig,
    takes_turns,
)
from longarc.config.training import ActivationConfig, OptimizerConfig, chosen_layers
from longarc.errors import ResourceError
from longarc.models.decoder_base import Decoder
from longarc.models.kernels.native import native
from longarc.models.room import available_bytes
from longarc.models.routed_rows import RoutingShape
from longarc.runs.disk import size_text

_log = logging.getLogger(__name__)

_FLOAT_BYTES = 4
_ADDRESSABLE_BYTES = 1 << 46
"""More memory than this no system hands out, though pages of a cache that nobody writes to take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory that a stage takes."""

    what: str
    num_bytes: int
    """[bytes]"""
    fix: str
    """What makes it less."""
    is_certain: bool = True
    """Whether the stage takes it whatever is sampled."""


def check_stages_fit(recipe: Recipe, model: Decoder, *, available: int | None = None) -> None:
    """Refuse a recipe with a stage that the memory cannot hold, and warn of one that it may not hold.

    Args:
        recipe: its stages are looked at one by one, as they run.
        model: without memory.
        available: memory that this process can get [bytes]; None asks the system.

    Raises:
        ResourceError: a stage needs more than that; names the parts, and what makes the largest smaller.
    """
    available = available_bytes() if available is None else available
    if available is None:
        return
    for name, stage in recipe.stages.items():
        needs = list(needs_of(stage, recipe, model))
        certain = sum(need.num_bytes for need in needs if need.is_certain)
        most = sum(need.num_bytes for need in needs)
        if certain > available:
            raise ResourceError(
                f"stage {name!r} needs at least {size_text(certain)} of memory, but {size_text(available)} are "
                f"available: {_said([need for need in needs if need.is_certain])}. Take a smaller model or a machine "
                f"with more memory, or {_largest(needs, is_certain=True).fix}"
            )
        if most > available:
            _log.warning(
                "stage %r may come to need %s of memory, but %s are available: %s. If it is killed, %s",
                *(name, size_text(most), size_text(available), _said(needs)),
                _largest(needs, is_certain=False).fix,
            )


def needs_of(stage: StageConfig, recipe: Recipe, model: Decoder) -> Iterator[Need]:
    """Yield what a stage takes.

    Args:
        stage: of the recipe.
        recipe: says what engine and how many threads.
        model: which is trained; without memory.
    """
    weights = sum(weight.nbytes for weight in model.state_dict().values())
    samples = isinstance(stage, RlConfig | DistillConfig | EvalConfig)
    if not isinstance(stage, EvalConfig):
        yield Need(what="weights", num_bytes=weights, fix="train with fewer layers")
    if not isinstance(stage, EvalConfig | MtpConfig):  # which trains one layer alone
        yield from _of_training(stage, recipe, model, weights)
    if samples and isinstance(recipe.engine, EngineConfig):
        at_servers = bool(servers_of(recipe.engine)) and not isinstance(stage, EvalConfig)
        if not at_servers:
            yield from _of_engine(recipe.engine, model, weights, stage)


def _of_training(
    stage: StageConfig, recipe: Recipe, model: Decoder, weights: int
) -> Iterator[Need]:
    assert not isinstance(stage, EvalConfig)
    is_alone = not isinstance(stage, RlConfig | DistillConfig) or takes_turns(stage)
    ranks = recipe.threads if is_alone else 1
    yield Need(
        what="gradients" if ranks == 1 else f"gradients of threads={ranks} processes",
        num_bytes=ranks * weights,
        fix="lower threads" if ranks > 1 else "train with fewer layers",
    )
    yield Need(
        what="the optimizer's moments",
        num_bytes=_moments(stage.optimizer) * weights,
        fix="set optimizer.use_muon" if not stage.optimizer.use_muon else "train with fewer layers",
    )
    tokens, is_certain = stage.micro_batch_tokens, False
    if isinstance(stage, TextStageConfig):  # whose batches are full
        tokens, is_certain = min(tokens, stage.tokens_per_step // ranks), True
    elif isinstance(stage, RlConfig | DistillConfig):
        rollouts = stage.loop.groups_per_step * stage.loop.group_size
        tokens = min(tokens, rollouts * stage.rollout.max_context_tokens // ranks)
    yield Need(
        what=f"activations of {ranks * tokens} tokens",
        num_bytes=ranks * tokens * activation_bytes_per_token(model, stage.activations),
        fix="lower micro_batch_tokens, or set activations.recomputed_layers",
        is_certain=is_certain,
    )


def _of_engine(
    engine: EngineConfig, model: Decoder, weights: int, stage: StageConfig
) -> Iterator[Need]:
    # The first update makes a second copy of the weights, which stays.
    copies = 1 if isinstance(stage, EvalConfig) else 2
    packed = weights if native() is not None else 0
    if model.compute_dtype == "bfloat16":
        packed //= 2
    yield Need(
        what=f"the engine's weights ({copies} cop{'y' if copies == 1 else 'ies'}, packed ones included)",
        num_bytes=copies * (weights + packed),
        fix="sample at servers on other machines (engine.servers)",
    )
    rows = engine.cache_tokens * cache_bytes_per_token(model, engine)
    yield Need(
        what=f"the engine's cache of engine.cache_tokens={engine.cache_tokens}",
        num_bytes=rows,
        fix="lower engine.cache_tokens",
        is_certain=rows > _ADDRESSABLE_BYTES,
    )
    routing = engine.cache_tokens * routing_bytes_per_token(model, stage)
    if routing:
        yield Need(
            what="the routing beside it",
            num_bytes=routing,
            fix="lower engine.cache_tokens, or replay less (rollout.routing_replay)",
            is_certain=routing > _ADDRESSABLE_BYTES,
        )


def _moments(optimizer: OptimizerConfig) -> int:
    """Return the least numbers that the optimizer keeps for a weight: Muon one for a matrix, AdamW two."""
    return 1 if optimizer.use_muon else 2


def cache_bytes_per_token(model: Decoder, engine: EngineConfig) -> int:
    """Return what a token leaves in the engine's cache [bytes], what drafts need included."""
    widths, layers = model.cache_widths(), model.cache_layers()
    all_layers = range(len(model.model.layers))
    num_values = sum(width * len(layers.get(kind, all_layers)) for kind, width in widths.items())
    if engine.num_speculative_tokens:
        num_values += sum(widths.values()) + model.config.hidden_size
    return _FLOAT_BYTES * num_values


def routing_bytes_per_token(model: Decoder, stage: StageConfig) -> int:
    """Return what the engine keeps beside a token's rows so that the trainer can replay its routing [bytes]."""
    if not isinstance(stage, RlConfig | DistillConfig):
        return 0
    shape = RoutingShape.of(model.config, stage.rollout.routing_replay, attention="sparse")
    return 0 if shape is None else shape.row_bytes


def activation_bytes_per_token(model: Decoder, activations: ActivationConfig) -> int:
    """Return the least that a token leaves for backward in all layers together [bytes].

    A layer keeps its input, both normed states and what attention returned, and gate and up of each feed-forward that the
    token goes through; a recomputed one its input alone, and one that is offloaded nothing.
    """
    config = model.config
    num_layers = len(model.model.layers)
    recomputed = chosen_layers(activations.recomputed_layers, num_layers)
    offloaded = chosen_layers(activations.offloaded_layers, num_layers)
    num_values = 0
    for layer in range(num_layers):
        if layer in offloaded:
            continue
        num_values += config.hidden_size
        if layer in recomputed:
            continue
        inner = getattr(config, "intermediate_size", None) or 0
        if isinstance(config, GlmMoeDsaConfig) and layer >= config.first_k_dense_replace:
            inner = config.num_experts_per_tok * config.moe_intermediate_size
        num_values += 3 * config.hidden_size + 2 * inner
    return _FLOAT_BYTES * num_values


def _said(needs: list[Need]) -> str:
    return ", ".join(f"{need.what} {size_text(need.num_bytes)}" for need in needs)


def _largest(needs: list[Need], *, is_certain: bool) -> Need:
    among = [need for need in needs if need.is_certain is is_certain] or needs
    return max(among, key=lambda need: need.num_bytes)
