"""Settings of the rollout engine: embedded, or servers behind the router."""

import re
from typing import Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from longarc.config.model import MAX_DEPTHS
from longarc.config.routing import RoutingConfig
from longarc.config.settings import Settings
from longarc.errors import ConfigError

WeightQuantisation: TypeAlias = Literal["none", "fp8"]
CacheQuantisation: TypeAlias = Literal["none", "fp8"]

ENGINE_KEY = "LONGARC_ENGINE_KEY"
"""Environment variable with the key of the engine servers; they and who uses them need the same."""
_MOST_PORT = 65_535
_ADDRESS = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class EngineConfig(Settings):
    """How completions are sampled: in this process, or by engine servers."""

    kind: Literal["embedded"] = "embedded"
    """LongArc's own engine, in its own process."""
    cache_tokens: int = Field(65_536, ge=16)
    """Tokens whose rows the cache holds, those of running sequences and those that are kept for reuse [tokens]. Costs that
    many times the bytes that a token leaves in the cache, which ``longarc models info`` tells; beyond 256 MiB memory is
    only used when it is first written to."""
    page_tokens: int = Field(64, ge=16)
    """Tokens of a page of the cache, the unit in which rows are shared and given away [tokens]; a power of two."""
    max_running: int = Field(64, ge=1)
    """Sequences decoded together in one step [sequences]."""
    max_waiting: int = Field(4096, ge=1)
    """Requests that may wait; one more is refused with an error [requests]."""
    max_prefill_tokens: int = Field(1024, ge=16)
    """Prompt tokens computed between two decode steps [tokens]; bounds how long decoding waits."""
    num_speculative_tokens: int = Field(0, ge=0, le=MAX_DEPTHS)
    """Tokens that the model's MTP layer drafts for each sequence before the model verifies all of them at once
    (speculative decoding), which changes no distribution [tokens]; may be more than the depths that were trained. 0
    drafts none. The cache then also holds the MTP layer's rows and the last states of all tokens."""
    min_draft_probability: float = Field(0.4, ge=0, le=1)
    """A draft is made only if the MTP layer gives it and those before it, together, this probability or more: verifying
    one that would hardly stay costs more than it brings. Changes no distribution. 0 always drafts as many as asked."""
    num_threads: int = Field(1, ge=1)
    """Compute threads of the engine; engine and trainer threads together must not exceed the cores."""

    weight_quantisation: WeightQuantisation = "none"
    """``fp8``: sample with what FP8 (e4m3, a scale for each block of 128 x 128) leaves of the matrices of attention and
    feed-forwards. It simulates rollouts of an FP8 server: numbers are rounded, nothing becomes faster or smaller, and the
    trainer's own weights are not touched, so their difference is in the run's ``mismatch`` figures. Evaluations and
    ``longarc serve`` sample with it too."""
    cache_quantisation: CacheQuantisation = "none"
    """``fp8``: what is written to the cache is rounded to e4m3 first: keys and values with a scale for each head of a
    token, latents and indexer keys with one for each 128 numbers; a latent's rotated part stays. Simulated as
    ``weight_quantisation`` is, with which it can be together: memory and speed stay what they were."""

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
            port = address.rpartition(":")[2]
            if port.isdecimal() and int(port) > _MOST_PORT:
                raise ValueError(f"{address!r}: there is no port {port}, the last is {_MOST_PORT}")
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
    def _pages_are_possible(self) -> Self:
        if self.page_tokens & (self.page_tokens - 1):
            raise ValueError(
                f"page_tokens={self.page_tokens} has to be a power of two: 16, 32, 64, ..."
            )
        if self.max_running * self.page_tokens > self.cache_tokens:
            raise ValueError(
                f"max_running={self.max_running} sequences need a page of {self.page_tokens} tokens each, but "
                f"cache_tokens={self.cache_tokens} are fewer. Lower max_running or raise cache_tokens."
            )
        return self

    def num_pages_for(self, max_context_tokens: int) -> int:
        """Return the pages of a cache for sequences of at most that length [tokens].

        Raises:
            ConfigError: the longest sequence does not fit.
        """
        if max_context_tokens > self.cache_tokens:
            raise ConfigError(
                f"a sequence of max_context_tokens={max_context_tokens} does not fit a cache of "
                f"cache_tokens={self.cache_tokens}; raise engine.cache_tokens or lower the context"
            )
        return -(-self.cache_tokens // self.page_tokens)
