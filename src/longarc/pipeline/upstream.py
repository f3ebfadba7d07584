"""Opens the engines that a gateway alone stands before: LongArc's own servers, vLLM or SGLang.

Nothing here imports torch: the gateway runs in the base install.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import orjson

from longarc.config.engine import ENGINE_KEY
from longarc.config.routing import RoutingConfig
from longarc.engine.http_json import HttpJson
from longarc.engine.remote import RemoteEngine
from longarc.engine.router import Router
from longarc.engine.served import ServedEngine, ServedLimits
from longarc.engine.sglang import SglangServer
from longarc.engine.sglang_pair import SglangPair
from longarc.engine.vllm import VllmServer
from longarc.engine.vllm_pair import VllmPair
from longarc.errors import CheckpointError, ConfigError, EngineError, EngineLostError, boundary
from longarc.records.ports import Engine
from longarc.records.sampling import UpdatePolicy

EngineKind: TypeAlias = Literal["longarc", "vllm", "sglang"]
ENGINE_KINDS: Final = ("longarc", "vllm", "sglang")

_MAX_REQUESTS = 4096
_UPDATE_TIMEOUT_S = 600.0
_MAX_PAIR_GAP = 0.15
"""How far the scores of a prefill server and its decode server may be apart after an update [nats]: what bfloat16 may
(``ServedEngineConfig.probe_bound``), because a gateway is not told what the servers compute in."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """Which engines, and what is known of their model."""

    kind: EngineKind
    addresses: tuple[str, ...]
    """At least one, all with the same model."""
    key: str | None
    """What they were started with; LongArc's own servers always have one."""
    model_directory: Path
    prefill_addresses: tuple[str, ...] = ()
    """Of vLLM or SGLang: for each address the server that prefills for it; none where servers do both."""
    max_context_tokens: int | None
    """Longest prompt and completion together [tokens]; None takes what engines or model can."""
    policy_version: int | None
    """Of the weights that vLLM or SGLang have now [optimizer steps]; None for LongArc's own, which know."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """Engines that answer."""

    engine: Engine
    max_context_tokens: int


def _connected(address: str, key: str | None) -> HttpJson:
    return HttpJson(address, api_key=key)


@asynccontextmanager
async def open_upstream(
    settings: UpstreamSettings, *, connect: Callable[[str, str | None], HttpJson] = _connected
) -> AsyncIterator[Upstream]:
    """Open the router over the engines until the block ends.

    Args:
        settings: which engines.
        connect: opens a server of vLLM or SGLang by address and key.

    Raises:
        ConfigError: the key is missing or wrong, engines differ, an option does not fit their kind, or one was started
            in a way that the gateway cannot use.
        EngineLostError: an engine does not answer.
    """
    async with AsyncExitStack() as opened:
        if settings.kind == "longarc":
            engines, longest = await _own_servers(settings, opened)
        else:
            engines, longest = await _served(settings, opened, connect)
        if settings.max_context_tokens is not None and settings.max_context_tokens > longest:
            raise ConfigError(
                f"--max-context-tokens {settings.max_context_tokens} is more than the {longest} tokens that the "
                f"engines can; ask for {longest} or less"
            )
        router = await opened.enter_async_context(Router(engines, RoutingConfig()))
        yield Upstream(router, settings.max_context_tokens or longest)


async def _own_servers(
    settings: UpstreamSettings, opened: AsyncExitStack
) -> tuple[Mapping[str, Engine], int]:
    if not settings.key:
        raise ConfigError(
            f"LongArc's engine servers have a key; give the one they were started with in {ENGINE_KEY}"
        )
    if settings.policy_version is not None:
        raise ConfigError(
            "--policy-version is for vLLM and SGLang; LongArc's engine servers know theirs, so leave it out"
        )
    if settings.prefill_addresses:
        raise ConfigError(
            "--prefill is for vLLM and SGLang; LongArc's engine servers compute prompts themselves, so leave it out"
        )
    engines: dict[str, Engine] = {}
    models: dict[str, Mapping[str, Any]] = {}
    contexts: list[int] = []
    for address in settings.addresses:
        first = await opened.enter_async_context(RemoteEngine(address, api_key=settings.key))
        described = await first.describe()
        models[address] = described.model
        contexts.append(described.max_context_tokens)
        ranks = [first]
        for rank in range(1, described.num_ranks):
            another = RemoteEngine(address, api_key=settings.key, rank=rank)
            ranks.append(await opened.enter_async_context(another))
        for rank, engine in enumerate(ranks):
            engine.expect(described)
            engines[f"{address}#{rank}"] = engine
    first_address, *others = settings.addresses
    for address in others:
        if models[address] != models[first_address]:
            raise ConfigError(
                f"{address} serves another model than {first_address}; a session may move between upstreams, so all "
                f"have to serve one model"
            )
    return engines, min(contexts)


async def _served(
    settings: UpstreamSettings,
    opened: AsyncExitStack,
    connect: Callable[[str, str | None], HttpJson],
) -> tuple[Mapping[str, Engine], int]:
    if settings.policy_version is None:
        raise ConfigError(
            f"--engine {settings.kind} needs --policy-version N, the optimizer steps in the weights that the server "
            f"has now (0 for a model that was not trained further): tokens are recorded under it"
        )
    vocab_size, longest = _shape(settings.model_directory)
    limits = ServedLimits(
        vocab_size=vocab_size,
        max_context_tokens=settings.max_context_tokens or longest,
        max_requests=_MAX_REQUESTS,
        update_timeout_s=_UPDATE_TIMEOUT_S,
    )
    engines: dict[str, Engine] = {}

    async def up(address: str) -> HttpJson:
        http = connect(address, settings.key)
        opened.push_async_callback(http.close)
        try:
            await http.text("/health")
        except EngineError as error:
            name = {"vllm": "vLLM", "sglang": "SGLang"}[settings.kind]
            raise EngineLostError(f"{address} does not answer as {name} does ({error})") from error
        return http

    for address, prefill_address in _pairs(settings):
        decode = await up(address)
        prefill = None if prefill_address is None else await up(prefill_address)
        server = await (
            _vllm(decode, prefill)
            if settings.kind == "vllm"
            else _sglang(decode, prefill, prefill_address)
        )
        await server.label(settings.policy_version)
        engines[address] = ServedEngine(server, limits, policy_version=settings.policy_version)
    return engines, longest


def _pairs(settings: UpstreamSettings) -> list[tuple[str, str | None]]:
    """Return each server with the one that prefills for it."""
    if not settings.prefill_addresses:
        return [(address, None) for address in settings.addresses]
    if len(settings.prefill_addresses) != len(settings.addresses):
        raise ConfigError(
            f"there are {len(settings.addresses)} --upstream and {len(settings.prefill_addresses)} --prefill; give one "
            f"--prefill for each --upstream, in the same order"
        )
    for address, prefill_address in zip(
        settings.addresses, settings.prefill_addresses, strict=True
    ):
        if address.rstrip("/") == prefill_address.rstrip("/"):
            raise ConfigError(
                f"--upstream and --prefill are both {address}; for a server that does both, leave --prefill out"
            )
    return list(zip(settings.addresses, settings.prefill_addresses, strict=True))


async def _vllm(decode: HttpJson, prefill: HttpJson | None) -> VllmServer | VllmPair:
    server = VllmServer(decode, on_update="continue")
    if prefill is None:
        await server.check()
        return server
    pair = VllmPair(
        VllmServer(prefill, on_update="continue"),
        server,
        on_update="continue",
        max_mean_gap=_MAX_PAIR_GAP,
    )
    await pair.check()
    return pair


async def _sglang(
    decode: HttpJson, prefill: HttpJson | None, prefill_address: str | None
) -> SglangServer | SglangPair:
    policy: UpdatePolicy = "continue" if prefill is None else "finish"
    server = SglangServer(decode, _NoTransport(), on_update=policy)
    info = await decode.get("/get_server_info")
    if not info.get("enable_deterministic_inference", False):
        _log.warning(
            "SGLang at %s ignores seeds without --enable-deterministic-inference: a session with a seed cannot be "
            "repeated",
            decode.where,
        )
    if prefill is None or prefill_address is None:
        await server.check(deterministic=None)
        return server
    return await SglangPair.found(
        SglangServer(prefill, _NoTransport(), on_update=policy),
        server,
        prefill_url=prefill_address,
        deterministic=None,
    )


class _NoTransport:
    """SGLang takes weights through a checkpoint directory that the trainer has and a gateway has not."""

    async def send(self, path: str, *, policy_version: int, flush_cache: bool) -> Any:
        """Refuse."""
        raise EngineError(
            f"a gateway alone cannot hand {path} to SGLang: let the trainer update the server, with "
            f"weight_version={policy_version}"
        )


def _shape(directory: Path) -> tuple[int, int]:
    """Return vocabulary and longest context of the model in a Hugging Face directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} has no config.json, which says how many ids the model has; give the directory that the "
            f"engine was started with"
        )
    with boundary(CheckpointError, f"{path} is not the config.json of a model"):
        config = orjson.loads(path.read_bytes())
        config = config.get("text_config", config)
        return int(config["vocab_size"]), int(config["max_position_embeddings"])
