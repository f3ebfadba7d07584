"""Builds the engine that samples: one in this process, or the router over engine servers."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from longarc.config.engine import ENGINE_KEY, EngineConfig
from longarc.config.model import ModelConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.line_client import MAX_LINE_BYTES
from longarc.engine.remote import RemoteEngine
from longarc.engine.router import Router
from longarc.engine.token_text import TokenText
from longarc.engine.wire import EngineDescription
from longarc.errors import ConfigError, EngineLostError
from longarc.models.routed_rows import RoutingShape
from longarc.pipeline.workspace import Loaded
from longarc.records.ports import Engine
from longarc.records.sampling import RoutingReplay, WeightSource
from longarc.runs.disk import size_text
from longarc.tokens.tokenizer import Tokenizer

_WEIGHTS = "model.safetensors"
_DEFAULT_CONTEXT_TOKENS = 4096


def embedded_engine(
    loaded: Loaded,
    config: EngineConfig,
    *,
    max_context_tokens: int,
    policy_version: int,
    num_threads: int,
    seed: int,
    tokenizer: Tokenizer | None = None,
    records_routing: RoutingReplay = "none",
) -> EmbeddedEngine:
    """Return an engine in this process over a checkpoint's model, which is its own from now on.

    Args:
        loaded: the checkpoint.
        config: of the engine.
        max_context_tokens: longest prompt and completion together [tokens].
        policy_version: version [optimizer steps] of the weights.
        num_threads: compute threads; a run may be served or evaluated on a smaller machine than it was made
            on, so never more than there are cores, which changes no number.
        seed: of requests without one.
        tokenizer: of the model; None refuses stop strings and constraints.
        records_routing: what of the routing of tokens requests may ask for.
    """
    return EmbeddedEngine(
        loaded.model,
        config.model_copy(update={"num_threads": min(num_threads, len(os.sched_getaffinity(0)))}),
        max_context_tokens=max_context_tokens,
        policy_version=policy_version,
        attention=loaded.attention,
        seed=seed,
        text=None
        if tokenizer is None
        else TokenText.of(tokenizer, vocab_size=loaded.model.config.vocab_size),
        records_routing=records_routing,
    )


def served_context_tokens(asked: int | None, model: ModelConfig) -> int:
    """Return the longest context that a server gives [tokens].

    Args:
        asked: by --max-context-tokens; None takes what the model can, at most 4096.
        model: what is served.

    Raises:
        ConfigError: the model cannot do that much.
    """
    longest = model.max_position_embeddings
    if asked is None:
        return min(_DEFAULT_CONTEXT_TOKENS, longest)
    if asked > longest:
        raise ConfigError(
            f"--max-context-tokens {asked} is more than the {longest} tokens that the model was made for "
            f"(max_position_embeddings); ask for {longest} or less"
        )
    return asked


async def stopped_or_failed(stop: asyncio.Event, engines: Sequence[Engine]) -> None:
    """Wait until ``stop`` is set, or until none of the engines can answer any more because all have failed.

    An engine of another program tells its failure only to who asks it for something, so it ends no wait.
    """
    own = [engine for engine in engines if isinstance(engine, EmbeddedEngine)]
    async with asyncio.TaskGroup() as tasks:
        waits: list[asyncio.Task[bool]] = [tasks.create_task(stop.wait())]
        if len(own) == len(engines):
            waits.append(tasks.create_task(_all_failed(own)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


async def _all_failed(engines: Sequence[EmbeddedEngine]) -> bool:
    for engine in engines:
        await engine.failed()
    return True


def raise_failure(engines: Sequence[Engine]) -> None:
    """Raise why the first engine that failed did so, where one did: whoever served it has to say that it ended badly.

    Raises:
        EngineError: of that engine.
    """
    for engine in engines:
        if isinstance(engine, EmbeddedEngine) and engine.failure is not None:
            raise engine.failure


@asynccontextmanager
async def engine_servers(
    config: EngineConfig,
    loaded: Loaded,
    *,
    max_context_tokens: int,
    routing_replay: RoutingReplay,
    seed: int,
) -> AsyncIterator[Engine]:
    """Open the router over the recipe's servers, all of which have the checkpoint's weights then.

    Args:
        config: names the servers.
        loaded: the checkpoint.
        max_context_tokens: what the stage needs [tokens].
        routing_replay: what of the routing the stage replays.
        seed: of requests without one.

    Raises:
        ConfigError: the key is missing or wrong, or a server has another model, attention or too little room, or does
            not record what the stage replays.
        EngineLostError: a server does not answer.
        WeightsRefusedError: the servers cannot load the checkpoint's weights.
    """
    key = os.environ.get(ENGINE_KEY)
    if not key:
        raise ConfigError(
            f"engine.servers needs the key that the servers were started with; give it in {ENGINE_KEY}"
        )
    _check_routing_fits(loaded, routing_replay, max_context_tokens)
    async with AsyncExitStack() as opened:
        engines: dict[str, Engine] = {}
        for address in config.servers:
            first = await opened.enter_async_context(RemoteEngine(address, api_key=key))
            try:
                described = await first.describe()
            except EngineLostError as error:
                raise EngineLostError(
                    f"{error}. Every server of engine.servers has to answer when a stage begins, because its "
                    f"model is compared then: start this one with longarc serve --engine-only, or take it out "
                    f"of engine.servers. One that is lost later is done without"
                ) from error
            _check(address, described, loaded, config, max_context_tokens=max_context_tokens)
            if routing_replay not in ("none", described.records_routing):
                raise ConfigError(
                    f"{address} records_routing={described.records_routing!r}, the stage replays {routing_replay!r} "
                    f"(rollout.routing_replay); start it with --records-routing {routing_replay}"
                )
            # Started anew it may record more or less than now, but not less than is asked for.
            described = replace(described, records_routing=routing_replay)
            ranks = [first]
            for rank in range(1, described.num_ranks):
                another = RemoteEngine(address, api_key=key, rank=rank)
                ranks.append(await opened.enter_async_context(another))
            for rank, engine in enumerate(ranks):
                engine.expect(described)
                engines[f"{address}#{rank}"] = engine
        router = await opened.enter_async_context(Router(engines, config.routing, seed=seed))
        await router.update_weights(
            WeightSource(
                path=str(loaded.path / _WEIGHTS), sha256=loaded.manifest.files[_WEIGHTS].sha256
            ),
            policy_version=loaded.manifest.policy_version,
        )
        yield router


def _check_routing_fits(
    loaded: Loaded, routing_replay: RoutingReplay, max_context_tokens: int
) -> None:
    """Refuse routing of which a server could not say that of a whole context in one piece."""
    shape = RoutingShape.of(loaded.model.config, routing_replay, attention=loaded.attention)
    if shape is None:
        return
    # Base64 in quotes, and a comma.
    longest = sum(-(-shape.blob_bytes(i) // 3) * 4 + 3 for i in range(max_context_tokens))
    if longest > MAX_LINE_BYTES:
        less = " replay 'experts'," if shape.num_indexers and shape.num_expert_layers else ""
        raise ConfigError(
            f"rollout.routing_replay={routing_replay!r}: the routing of rollout.max_context_tokens={max_context_tokens} "
            f"can take {size_text(longest)}, but an engine server sends {size_text(MAX_LINE_BYTES)} at once at most;"
            f"{less} shorten the context, or sample in the run's own process (no engine.servers)"
        )


def _check(
    address: str,
    server: EngineDescription,
    loaded: Loaded,
    config: EngineConfig,
    *,
    max_context_tokens: int,
) -> None:
    """Refuse a server that would sample from something else than the stage trains."""
    model = loaded.model.config.model_dump(mode="json")
    different = sorted(
        key for key in {*model, *server.model} if model.get(key) != server.model.get(key)
    )
    if different:
        key = different[0]
        raise ConfigError(
            f"{address} serves another model: {key} is {server.model.get(key)!r} there and "
            f"{model.get(key)!r} in {loaded.path}; start it on a checkpoint of this run"
        )
    if server.attention != loaded.attention:
        raise ConfigError(
            f"{address} attends {server.attention}, the checkpoint {loaded.path} is to attend "
            f"{loaded.attention}; start it on that checkpoint's stage"
        )
    for name in ("weight_quantisation", "cache_quantisation"):
        there, here = getattr(server, name), getattr(config, name)
        if there != here:
            raise ConfigError(
                f"{address} samples with {name}={there!r}, the recipe says {here!r} (engine.{name}); start it on a "
                f"run whose recipe says the same"
            )
    if server.max_context_tokens < max_context_tokens:
        raise ConfigError(
            f"{address} has room for {server.max_context_tokens} tokens, the stage asks for "
            f"{max_context_tokens} (rollout.max_context_tokens); start it with --max-context-tokens "
            f"{max_context_tokens}"
        )
