"""Asks the servers that later stages sample from, before the first stage: an hour of training may lie before them."""

import asyncio
import contextlib
import os
from collections.abc import Collection

from longarc.config.engine import ENGINE_KEY, EngineConfig
from longarc.config.engine_clients import servers_of
from longarc.config.recipe import Recipe
from longarc.config.rollout import SamplingStageConfig
from longarc.config.stages import EvalConfig
from longarc.engine.http_json import HttpJson
from longarc.engine.remote import RemoteEngine
from longarc.errors import ConfigError, EngineError, EngineLostError


def servers_to_ask(recipe: Recipe, *, finished: Collection[str] = ()) -> tuple[str, ...]:
    """Return the addresses of running servers that stages still to come sample from.

    Args:
        recipe: names them in ``engine.servers``, or ``engine.url`` and ``engine.prefill_url``.
        finished: stages that are done.
    """
    engine = recipe.engine
    if isinstance(engine, EngineConfig):
        addresses: tuple[str, ...] = servers_of(engine)
        sampling: tuple[type, ...] = (SamplingStageConfig,)
    else:
        addresses = tuple(url for url in (engine.prefill_url, engine.url) if url is not None)
        sampling = (SamplingStageConfig, EvalConfig)
    to_come = (stage for name, stage in recipe.stages.items() if name not in finished)
    return addresses if any(isinstance(stage, sampling) for stage in to_come) else ()


async def check_servers(
    recipe: Recipe, *, finished: Collection[str] = (), timeout_s: float = 5.0
) -> None:
    """Ask every server that a stage to come samples from whether it is there.

    What it serves is compared when the stage begins, whose checkpoint it gets then.

    Args:
        recipe: names them.
        finished: stages that are done.
        timeout_s: how long each may take to answer [seconds].

    Raises:
        ConfigError: the key of LongArc's own servers is missing or wrong.
        EngineLostError: servers do not answer; it names them all.
    """
    addresses = servers_to_ask(recipe, finished=finished)
    if not addresses:
        return
    is_ours = isinstance(recipe.engine, EngineConfig)
    key = os.environ.get(ENGINE_KEY, "")
    if is_ours and not key:
        raise ConfigError(
            f"engine.servers needs the key that the servers were started with; give it in {ENGINE_KEY}"
        )
    async with asyncio.TaskGroup() as tasks:
        asked = {
            address: tasks.create_task(
                _lack_of(address, key if is_ours else None, timeout_s), name=f"ask {address}"
            )
            for address in addresses
        }
    lacks = [lack for task in asked.values() if (lack := task.result()) is not None]
    wrong = next((lack for lack in lacks if isinstance(lack, ConfigError)), None)
    if wrong is not None:
        raise wrong
    if lacks:
        setting = "engine.servers" if is_ours else "engine.url, engine.prefill_url"
        start = "longarc serve --engine-only" if is_ours else str(recipe.engine.kind)
        raise EngineLostError(
            f"{'; '.join(map(str, lacks))}. Stages of this recipe sample there ({setting}): start it with {start}, "
            f"or correct the address. If it is to be started later, over a stage of this run say, add --servers-later"
        )


async def _lack_of(
    address: str, key: str | None, timeout_s: float
) -> ConfigError | EngineError | None:
    """Return what is wrong with a server; ``key`` is that of LongArc's own, and None for others."""
    async with contextlib.AsyncExitStack() as opened:
        try:
            async with asyncio.timeout(timeout_s):
                if key is None:
                    http = HttpJson(address)
                    opened.push_async_callback(http.close)
                    await http.text("/health")
                else:
                    remote = RemoteEngine(address, api_key=key, connect_timeout_s=timeout_s)
                    await (await opened.enter_async_context(remote)).describe()
        except TimeoutError:
            return EngineLostError(f"{address} does not answer within {timeout_s:g} s")
        except (ConfigError, EngineError) as error:
            return error
    return None
