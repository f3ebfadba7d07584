"""Settings of engines from elsewhere: vLLM and SGLang behind the port of the embedded engine."""

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from longarc.config.engine import EngineConfig
from longarc.config.settings import Settings
from longarc.records.sampling import UpdatePolicy

LEAST_VLLM_TEMPERATURE = 0.01
"""vLLM raises anything between 0 and this to it, without saying so to the client."""
SAMPLING_MASK_ARG = "--return-sampling-mask"
"""With which vLLM says what a truncated token was drawn from."""

_OWN_VLLM_ARGS = (
    "--model",
    "--uds",
    "--host",
    "--port",
    "--dtype",
    "--max-model-len",
    "--max-num-seqs",
    "--enforce-eager",
    "--enable-chunked-prefill",
    "--no-enable-chunked-prefill",
    "--kv-cache-memory-bytes",
    "--logprobs-mode",
    "--worker-extension-cls",
    "--skip-tokenizer-init",
    "--generation-config",
    "--enable-scale-out",
    "--tokens-only",
    "--api-key",
)
_OWN_SGLANG_ARGS = (
    "--model-path",
    "--model",
    "--host",
    "--port",
    "--dtype",
    "--context-length",
    "--max-running-requests",
    "--tp-size",
    "--tp",
    "--skip-tokenizer-init",
    "--sampling-defaults",
    "--weight-version",
    "--api-key",
)


class ServedEngineConfig(Settings):
    """What vLLM and SGLang have in common: a server that LongArc starts, or one that runs already."""

    python: str | None = None
    """Interpreter of the environment that has the engine (``scripts/setup_vllm.sh`` makes one): LongArc starts
    the server, and stops it. It never shares LongArc's own environment."""
    url: str | None = Field(None, pattern=r"^https?://")
    """Address of a server that runs already, instead of ``python``. It must see the run directory under the same
    path, because weights are handed over as files."""
    prefill_url: str | None = Field(None, pattern=r"^https?://")
    """Address of a second server that runs already and prefills for the one at ``url``, which then only decodes.
    Weights go to both. Tested against fakes that follow the documentation, never against real servers."""
    args: tuple[str, ...] = ()
    """More arguments of the server, as on its command line; those that LongArc sets itself are refused."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of the server."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the server's weights; the trainer's are float32."""
    on_update: UpdatePolicy = "continue"
    """Running sequences at a weight update: ``continue`` on the new weights with the old cache; ``recompute``
    their cache with the new weights first; ``finish`` on the old weights, for which the update waits."""
    max_probe_gap: float | None = Field(None, gt=0)
    """Largest mean difference between the engine's and the trainer's log-probabilities of the probe [nats]; more
    stops the run. None is 0.002 in float32 and 0.15 in bfloat16."""
    max_running: int = Field(64, ge=1)
    """Sequences decoded together [sequences]."""
    max_waiting: int = Field(4096, ge=1)
    """Requests beyond these that may wait; one more is refused with an error [requests]."""
    num_threads: int = Field(1, ge=1)
    """Compute threads of a server on a CPU; with the trainer's they must not exceed the cores."""
    start_timeout_s: float = Field(900.0, gt=0)
    """How long a server may take until it answers [seconds]."""
    update_timeout_s: float = Field(600.0, gt=0)
    """How long a weight update may take, with all it waits for [seconds]."""

    @property
    def probe_bound(self) -> float:
        """Largest gap of the probe [nats]."""
        if self.max_probe_gap is not None:
            return self.max_probe_gap
        return 0.002 if self.dtype == "float32" else 0.15

    @model_validator(mode="after")
    def _has_one_server(self) -> Self:
        if (self.python is None) == (self.url is None):
            raise ValueError(
                f"python={self.python!r} and url={self.url!r}: set python to start a server, or url to "
                f"use one that runs, and not both"
            )
        if self.url is not None and (self.args or self.environment):
            raise ValueError(
                f"args={list(self.args)} and environment={sorted(self.environment)} are for a server that "
                f"LongArc starts, but url={self.url!r} runs already; give them to that server instead"
            )
        return self

    @model_validator(mode="after")
    def _prefills_for_another(self) -> Self:
        if self.prefill_url is None:
            return self
        if self.url is None:
            raise ValueError(
                f"prefill_url={self.prefill_url!r} needs url, the address of the server that decodes: LongArc "
                f"starts no pair of servers; start both, and leave python out"
            )
        if self.prefill_url.rstrip("/") == self.url.rstrip("/"):
            raise ValueError(
                f"prefill_url and url are both {self.url!r}; for one server that does both, leave prefill_url out"
            )
        return self


class VllmConfig(ServedEngineConfig):
    """vLLM as the engine."""

    kind: Literal["vllm"]
    """A vLLM server."""
    eager: bool = True
    """Run without compiling the model: starts minutes sooner, decodes slower."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory of the key-value cache [GiB]."""
    chunked_prefill: bool = False
    """Compute long prompts in chunks, between which others decode. vLLM's CPU build (0.32.0) ends when a request
    with a seed, as all of LongArc's have, is computed in chunks; on a GPU true is right for long contexts."""

    @model_validator(mode="after")
    def _args_are_free(self) -> Self:
        _refuse_own(self.args, _OWN_VLLM_ARGS)
        return self

    @model_validator(mode="after")
    def _pair_can_update(self) -> Self:
        if self.prefill_url is not None and self.on_update == "recompute":
            raise ValueError(
                'on_update="recompute" is not possible with prefill_url: a cache on its way between the servers '
                'would stay that of the old weights; use "continue" or "finish"'
            )
        return self


class SglangConfig(ServedEngineConfig):
    """SGLang as the engine. Written to its documentation and tested against a fake of it, never a real server."""

    kind: Literal["sglang"]
    """A SGLang server."""
    update_from: Literal["disk", "tensor", "distributed"] = "disk"
    """How weights travel: ``disk``: the server reads the published file; ``tensor``: handles of tensors on a GPU
    that both share; ``distributed``: a broadcast over a process group."""
    device: str = "cuda:0"
    """Where ``tensor`` and ``distributed`` put the weights to send them."""
    group_address: str | None = Field(None, pattern=r"^[^:\s]+:\d+$")
    """``host:port`` on this machine at which ``distributed`` makes its process group."""
    num_ranks: int = Field(1, ge=1)
    """Ranks of the server (tensor parallel size), each of which gets the weights [ranks]."""
    deterministic: bool = False
    """Whether the server runs with ``--enable-deterministic-inference``, without which it ignores seeds."""

    @model_validator(mode="after")
    def _args_are_free(self) -> Self:
        _refuse_own(self.args, _OWN_SGLANG_ARGS)
        return self

    @model_validator(mode="after")
    def _pair_can_update(self) -> Self:
        if self.prefill_url is None:
            return self
        if self.on_update != "finish":
            raise ValueError(
                f'on_update="{self.on_update}" is not possible with prefill_url: the prefill server samples the '
                f'first token, and what SGLang then reports as its version is not documented; use "finish"'
            )
        if self.update_from != "disk":
            raise ValueError(
                f'update_from="{self.update_from}" reaches one server only; with prefill_url use "disk"'
            )
        return self

    @model_validator(mode="after")
    def _way_is_complete(self) -> Self:
        is_distributed = self.update_from == "distributed"
        if is_distributed and self.group_address is None:
            raise ValueError(
                'update_from="distributed" needs group_address, for example "127.0.0.1:29500"'
            )
        if not is_distributed and self.group_address is not None:
            raise ValueError(
                f'group_address={self.group_address!r} is only used by update_from="distributed", but '
                f"update_from={self.update_from!r}; leave it out"
            )
        if self.update_from == "disk" and self.device != "cuda:0":
            raise ValueError(
                f'device={self.device!r} is not used by update_from="disk"; leave it out'
            )
        return self


def _refuse_own(args: tuple[str, ...], own: tuple[str, ...]) -> None:
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        if name in own:
            raise ValueError(
                f"args has {arg!r}, which LongArc sets itself from the recipe; remove it from args"
            )


def _embedded_by_default(value: Any) -> Any:
    """A recipe without ``kind`` means the embedded engine."""
    return {"kind": "embedded", **value} if isinstance(value, dict) else value


AnyEngineConfig: TypeAlias = Annotated[
    EngineConfig | VllmConfig | SglangConfig,
    Field(discriminator="kind"),
    BeforeValidator(_embedded_by_default),
]
"""Any engine a recipe can ask for."""


def servers_of(config: AnyEngineConfig) -> tuple[str, ...]:
    """Return the addresses of LongArc's own engine servers that sample in training stages; none for other engines."""
    return config.servers if isinstance(config, EngineConfig) else ()
