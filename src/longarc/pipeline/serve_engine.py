"""An engine server over a checkpoint: what rollouts on other machines sample from.

A run that is being trained may be served: nothing of it is locked or written.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longarc.config.engine import EngineConfig
from longarc.config.recipe import INITIAL, Recipe
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.token_text import TokenText
from longarc.engine.wire import EngineDescription
from longarc.errors import ConfigError
from longarc.gateway.server import bound_socket
from longarc.gateway.server import serving as http_serving
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_pretrained_dir, pretrained_config
from longarc.pipeline.engines import raise_failure, served_context_tokens, stopped_or_failed
from longarc.pipeline.workspace import (
    TOKENIZER_FILE,
    Attention,
    load_checkpoint,
)
from longarc.records.sampling import RoutingReplay
from longarc.runs.directory import RunDirectory
from longarc.tokens.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MIN_MOST_RANKS = 8
_SPARSE_FAMILY = "glm_moe_dsa"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServerSettings:
    """What an engine server serves, and where."""

    stage: str | None
    """Stage whose final checkpoint is served first; None = the newest one that is finished."""
    attention: Literal["dense", "sparse"] | None
    """How the model of a Hugging Face directory attends, None = densely; a run's checkpoint knows."""
    host: str
    port: int
    """0 takes a free one."""
    api_key: str
    num_ranks: int
    """Engines side by side, each with its own copy of the model and its share of the cores."""
    max_context_tokens: int | None
    """Longest prompt and completion together [tokens]; None = what the model can, at most 4096."""
    records_routing: RoutingReplay
    """What of the routing of tokens is recorded for stages that replay it."""
    drain_s: float
    """How long running requests may take to end once the server is told to stop [seconds]."""


@dataclass(frozen=True, slots=True)
class _Served:
    """How to get the model, again for each rank, and what is known of it."""

    load: Callable[[], Decoder]
    attention: Attention
    policy_version: int
    config: EngineConfig
    seed: int
    tokenizer: Tokenizer | None
    """The one beside the weights; None where there is none, and then stop strings and constraints are refused."""

    def text(self, vocab_size: int) -> TokenText | None:
        """Return what an engine reads of the tokenizer."""
        if self.tokenizer is None:
            return None
        return TokenText.of(self.tokenizer, vocab_size=vocab_size)


async def serve_engine(
    source: Path,
    recipe: Recipe | None,
    settings: EngineServerSettings,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until ``stop`` is set or every engine has failed, then drain.

    Args:
        source: a run directory, or a Hugging Face directory.
        recipe: of the run; None for a Hugging Face directory.
        settings: what and where.
        stop: ends it.
        on_ready: told the address once requests are answered.

    Raises:
        ConfigError: no stage is finished, or the asked one is not; or an option asks for what the model or the
            machine cannot do.
        ResourceError: the address cannot be had.
        EngineError: an engine failed; the server goes on as long as another one is left.
    """
    _check_ranks(settings.num_ranks)
    served = (
        _of_directory(source, settings) if recipe is None else _of_run(source, recipe, settings)
    )
    listener = bound_socket(settings.host, settings.port)
    async with AsyncExitStack() as opened:
        opened.callback(listener.close)
        ranks: list[EmbeddedEngine] = []
        for rank in range(settings.num_ranks):
            model = served.load()
            max_context_tokens = served_context_tokens(settings.max_context_tokens, model.config)
            engine = EmbeddedEngine(
                model,
                served.config,
                max_context_tokens=max_context_tokens,
                policy_version=served.policy_version,
                attention=served.attention,
                seed=served.seed + rank,
                text=served.text(model.config.vocab_size),
                records_routing=settings.records_routing,
            )
            ranks.append(await opened.enter_async_context(engine))
        door = EngineDoor(
            ranks,
            EngineDescription(
                model=model.config.model_dump(mode="json"),
                attention=served.attention,
                max_context_tokens=max_context_tokens,
                num_ranks=settings.num_ranks,
                weight_quantisation=served.config.weight_quantisation,
                records_routing=settings.records_routing,
                cache_quantisation=served.config.cache_quantisation,
            ),
            DoorSettings(api_key=settings.api_key),
        )
        async with http_serving(door.app(), listener) as address:
            on_ready(address)
            await stopped_or_failed(stop, ranks)
            await door.drain(within_s=settings.drain_s)
        raise_failure(ranks)


def _check_ranks(num_ranks: int) -> None:
    """Refuse more engines than there are cores to share; on a small machine a few more do no harm."""
    most = max(_num_cores(), _MIN_MOST_RANKS)
    if num_ranks > most:
        raise ConfigError(
            f"--ranks {num_ranks}: at most {most} here, where {_num_cores()} cores are to be shared; each rank has "
            f"a copy of the model, and one without a core makes nothing faster"
        )


def _of_directory(directory: Path, settings: EngineServerSettings) -> _Served:
    if settings.stage is not None:
        raise ConfigError(f"--stage means nothing for {directory}, which is no run")
    family = pretrained_config(directory).family
    if settings.attention == "sparse" and family != _SPARSE_FAMILY:
        raise ConfigError(
            f"--attention sparse: {directory} holds a {family} model, which has no sparse attention; leave it out"
        )
    if settings.attention is None and family == _SPARSE_FAMILY:
        _log.warning(
            "%s does not say how its model was trained to attend: it attends densely; give --attention sparse "
            "if a dsa stage trained it",
            directory,
        )
    return _Served(
        load=lambda: load_pretrained_dir(directory),
        attention=settings.attention or "dense",
        policy_version=0,
        config=_with_threads(_config_for(settings), _num_cores(), settings),
        seed=0,
        tokenizer=_tokenizer(directory),
    )


def _config_for(settings: EngineServerSettings) -> EngineConfig:
    """Return the settings of an engine without a recipe, whose cache holds the longest sequence that is asked for."""
    config = EngineConfig()
    longest = settings.max_context_tokens or 0
    return config.model_copy(update={"cache_tokens": max(config.cache_tokens, longest)})


def _of_run(run_dir: Path, recipe: Recipe, settings: EngineServerSettings) -> _Served:
    if settings.attention is not None:
        raise ConfigError(
            f"--attention means nothing for the run {run_dir}: its checkpoints know how they attend"
        )
    run = RunDirectory.look(run_dir)
    trained = [name for name, stage in recipe.stages.items() if stage.kind != "eval"]
    finals = {name: run.stage(name).final() for name in (INITIAL, *trained)}
    finished = {name: path for name, path in finals.items() if path is not None}
    stage = settings.stage or next(reversed(finished), None)
    if stage not in finished:
        raise ConfigError(
            f"{'no stage' if stage is None else f'--stage {stage!r}'} of {run_dir} "
            f"{'can' if stage is None else 'cannot'} be served: finished training stages are {list(finished)}"
        )
    path = finished[stage]
    loaded = load_checkpoint(path)
    return _Served(
        load=lambda: load_checkpoint(path).model,
        attention=loaded.attention,
        policy_version=loaded.manifest.policy_version,
        # A run that samples from other engines says nothing about LongArc's own.
        config=_with_threads(
            recipe.engine if isinstance(recipe.engine, EngineConfig) else EngineConfig(),
            min(recipe.threads, _num_cores()),
            settings,
        ),
        seed=recipe.seed,
        tokenizer=_tokenizer(run_dir),
    )


def _with_threads(
    config: EngineConfig, num_cores: int, settings: EngineServerSettings
) -> EngineConfig:
    return config.model_copy(update={"num_threads": max(1, num_cores // settings.num_ranks)})


def _tokenizer(directory: Path) -> Tokenizer | None:
    path = directory / TOKENIZER_FILE
    return Tokenizer.load(path) if path.exists() else None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
