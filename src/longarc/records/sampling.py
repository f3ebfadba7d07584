"""What is asked of an engine for one completion, and what it answers token by token."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
"""stop: a stop id was sampled (and is part of the completion); length: the token budget ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion. Log-probabilities are always those of this distribution."""

    max_new_tokens: int
    """Upper bound of the completion [tokens]."""
    temperature: float = 1.0
    """0 takes the most likely token (lowest id on ties); its log-probability is then 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; the id is the completion's last token."""
    stream_interval_tokens: int = 0
    """Tokens between two pieces while the completion runs; 0 hands over a piece only when the weights
    change and at the end, which costs the engine least."""
    seed: int | None = None
    """Makes the completion reproducible for the same weights; None draws a seed from the engine's stream."""
    num_sampled_before: int = 0
    """Tokens at the end of the prompt that belong to this completion already [tokens]: it was begun elsewhere
    and goes on here. Draws go on at this position of the seed's stream; the budget is what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """A piece of a completion, in sampling order. Pieces of one completion follow each other without gaps."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log-probability [nats] of each token under the distribution it was sampled from."""
    policy_version: int
    """Weight version [optimizer steps] that sampled every token of this piece."""
    finish_reason: FinishReason | None = None
    """Set on the last piece only."""
    num_cached_tokens: int = 0
    """Prompt tokens served from the prefix cache; set on the first piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Weights somewhere an engine can read them."""

    path: str
    """A safetensors file with the model's own parameter names."""
    sha256: str
    """Digest of the file's bytes; an engine refuses weights that do not match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """What an engine says of itself."""

    is_ready: bool
    policy_version: int
    num_running: int
    num_waiting: int
    num_sampled_tokens: int
    """Tokens sampled since the engine started."""
    num_prompt_tokens: int
    """Prompt tokens asked for since the engine started, cached ones included."""
    num_cached_tokens: int
    """Prompt tokens that the prefix cache saved since the engine started."""
    busy_s: float = 0.0
    """Time spent computing since the engine started [seconds]."""
    instance_id: str = ""
    """Differs after every start of the engine, whose weights and cache are then its first ones; empty
    where the engine does not tell."""
