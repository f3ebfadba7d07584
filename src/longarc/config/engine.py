"""Settings of the rollout engine: embedded, or servers behind the router."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from longarc.config.routing import RoutingConfig
from longarc.config.settings import Settings

_ADDRESS = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class EngineConfig(Settings):
    """How completions are sampled: in this process, or by engine servers."""

    kind: Literal["embedded"] = "embedded"
    """LongArc's own engine, in its own process."""
    num_slots: int = Field(96, ge=1)
    """Sequences whose cache is kept at one time, running and idle ones [sequences]."""
    max_running: int = Field(64, ge=1)
    """Sequences decoded together in one step [sequences]; at most ``num_slots``."""
    max_waiting: int = Field(4096, ge=1)
    """Requests that may wait; one more is refused with an error [requests]."""
    max_prefill_tokens: int = Field(1024, ge=16)
    """Prompt tokens computed between two decode steps [tokens]; bounds how long decoding waits."""
    num_threads: int = Field(1, ge=1)
    """Compute threads of the engine; engine and trainer threads together must not exceed the cores."""

    servers: tuple[str, ...] = ()
    """Addresses (``http://host:port``) of servers that ``longarc serve --engine-only`` runs. RL and
    distillation stages then sample there, through the router, and give them their weights by path, so all
    need the same file system. Evaluations and ``longarc serve`` sample in their own process all the same."""
    routing: RoutingConfig = RoutingConfig()
    """How requests are spread over the servers."""

    @field_validator("servers")
    @classmethod
    def _servers_are_addresses(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        for address in servers:
            if not _ADDRESS.fullmatch(address):
                raise ValueError(
                    f"{address!r} is not the address of an engine server; write http://host:port, without "
                    f"a path"
                )
            if servers.count(address) > 1:
                raise ValueError(f"{address!r} stands there twice; name each server once")
        return servers

    @model_validator(mode="after")
    def _routing_has_servers(self) -> Self:
        if not self.servers and self.routing != RoutingConfig():
            raise ValueError(
                "routing has no effect without servers: name them in engine.servers, or leave engine.routing "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _running_fits_slots(self) -> Self:
        if self.max_running > self.num_slots:
            raise ValueError(
                f"max_running={self.max_running} exceeds num_slots={self.num_slots}: every running "
                f"sequence needs a slot. Lower max_running or raise num_slots."
            )
        return self
