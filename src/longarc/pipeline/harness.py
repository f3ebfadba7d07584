"""Makes the harness that a recipe or a command asks for, and the family whose tasks it works on."""

from typing import Any

from longarc.config.harness import HarnessConfig
from longarc.config.load_object import load_object
from longarc.envs.harnesses.family import HarnessFamily, HarnessLimits
from longarc.errors import ConfigError, boundary
from longarc.records.ports import Harness, TaskFamily


def make_harness(config: HarnessConfig, *, where: str = "harness") -> Harness:
    """Return the harness of some settings.

    Args:
        config: the settings.
        where: what they stand under, for messages.

    Raises:
        ConfigError: the import path is wrong, the settings are, or the program is not installed.
    """
    factory = load_object(config.path, kind=type)
    settings: dict[str, Any] = dict(config.settings)
    with boundary(ConfigError, f"{where}: {config.kind} with settings {settings}"):
        harness = factory(**settings)
    if not isinstance(harness, Harness):
        raise ConfigError(
            f"{where}: {config.path} is not a Harness: it needs name, shown and run() (longarc.records.ports)"
        )
    return harness


def played_by(
    config: HarnessConfig, family: TaskFamily, *, where: str = "harness"
) -> HarnessFamily:
    """Return a family whose tasks a harness works on; see ``make_harness``."""
    return HarnessFamily(family, make_harness(config, where=where), limits_of(config))


def limits_of(config: HarnessConfig) -> HarnessLimits:
    """Return what one rollout may use."""
    return HarnessLimits(
        max_requests=config.max_requests,
        timeout_s=config.timeout_s,
        memory_bytes=config.memory_bytes,
        disk_bytes=config.disk_bytes,
        num_processes=config.num_processes,
    )
