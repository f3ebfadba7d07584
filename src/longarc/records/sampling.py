"""What is asked of an engine for one completion, and what it answers token by token."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from longarc.errors import ContractError
from longarc.records.constraint import Constraint

MAX_SEED = 2**63 - 1
"""Largest seed: what every engine, and every JSON between them, can carry as a whole number."""
MIN_TEMPERATURE = 1e-6
"""Least temperature above 0; dividing by less leaves no numbers in single precision."""

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
"""stop: a stop id was sampled, or the last token completed a stop string (it is part of the completion); length:
the token budget ran out."""


UpdatePolicy: TypeAlias = Literal["continue", "recompute", "finish"]
"""What becomes of a running sequence when new weights arrive. continue: it goes on under them with the cache that the
old ones computed; recompute: its cache is computed anew by them before it samples on; finish: it ends under the old
ones."""


RoutingReplay: TypeAlias = Literal["none", "experts", "experts_and_keys"]
"""What of the engine's routing the trainer takes over: nothing; the experts of each token; also the keys that each
token's indexers selected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion. Log-probabilities are always those of this distribution.

    Logits are divided by the temperature; top-k keeps the likeliest tokens; of these, top-p keeps the likeliest
    until they have that share of the probability; of these, min-p keeps those that are likely enough beside the
    likeliest. Tokens tied with the last one kept are kept too. What is left is normalised again. A constraint comes
    first of all: what it does not allow is not there.
    """

    max_new_tokens: int
    """Upper bound of the completion [tokens]."""
    temperature: float = 1.0
    """0 takes the most likely token (lowest id on ties); its log-probability is then 0. Else at least 1e-6."""
    top_p: float = 1.0
    """Share of the probability that the kept tokens reach; above 0, and 1 keeps every token."""
    top_k: int = 0
    """Tokens that are kept; 0 keeps every token."""
    min_p: float = 0.0
    """Least probability of a kept token, as a share of the likeliest one's; below 1, and 0 keeps every token."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; the id is the completion's last token."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends the completion as soon as the sampled tokens spell it; the token that completes it is the
    completion's last one. Only what was sampled is looked at, never the prompt."""
    returns_kept_ids: bool = False
    """Whether each piece says which tokens top-k, top-p and min-p left to draw from, so that a trainer can score under
    the same distribution."""
    returns_raw_logprobs: bool = False
    """Whether each piece also has the log-probabilities at temperature 1 over the whole vocabulary."""
    returns_routing_from: int | None = None
    """Position, in prompt and completion together, from which on each piece also says what tokens were routed to; the
    last one of the prompt at most, because the first token is drawn there. None asks for nothing."""
    stream_interval_tokens: int = 0
    """Tokens between two pieces while the completion runs; 0 hands over a piece only when the weights
    change and at the end, which costs the engine least. A router hands over more pieces than that, and an engine that
    drafts a few tokens more in a piece."""
    seed: int | None = None
    """Makes the completion reproducible for the same weights; 0 to 2**63 - 1. None draws a seed from the engine's
    stream."""
    on_update: UpdatePolicy | None = None
    """What becomes of the completion when new weights arrive while it runs; None leaves it to the engine, and the
    embedded one continues. Whatever it is, each piece names the version that sampled its tokens."""
    constraint: Constraint | None = None
    """What the text has to follow; at least one stop id ends it then."""
    num_sampled_before: int = 0
    """Tokens at the end of the prompt that belong to this completion already [tokens]: it was begun elsewhere
    and goes on here. Draws go on at this position of the seed's stream; the budget is what is left."""

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"0, or at least {MIN_TEMPERATURE} and finite",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0, which keeps every token"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            (
                "stop_ids",
                all(0 <= token_id <= MAX_SEED for token_id in self.stop_ids),
                "ids of tokens, which are at least 0 and below 2**63",
            ),
            ("stop_strings", all(self.stop_strings), "without an empty string"),
            (
                "returns_routing_from",
                self.returns_routing_from is None or self.returns_routing_from >= 0,
                "None, or a position from 0 on",
            ),
            ("stream_interval_tokens", self.stream_interval_tokens >= 0, "at least 0"),
            (
                "seed",
                self.seed is None or 0 <= self.seed <= MAX_SEED,
                f"None, or at least 0 and at most {MAX_SEED} (2**63 - 1)",
            ),
            (
                "on_update",
                self.on_update is None or self.on_update in get_args(UpdatePolicy),
                f"None or one of {get_args(UpdatePolicy)}",
            ),
            ("num_sampled_before", self.num_sampled_before >= 0, "at least 0"),
            (
                "stop_ids",
                self.constraint is None or len(self.stop_ids) > 0,
                "at least one id, because a constraint lets nothing else end a completion",
            ),
        )
        for name, holds, allowed in rules:
            if not holds:
                raise ContractError(f"Sampling: {name}={getattr(self, name)!r} has to be {allowed}")

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens may be left out of what is drawn from."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


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
    kept_ids: tuple[tuple[int, ...], ...] = ()
    """Of each token, the ids it was drawn from, ascending; () where it was the whole vocabulary. Empty where nobody
    asked."""
    raw_logprobs: tuple[float, ...] = ()
    """log-probability [nats] of each token at temperature 1 over the whole vocabulary; empty where nobody asked."""
    routing: tuple[bytes, ...] = ()
    """What the passes behind these log-probabilities routed tokens to: of each position behind those of the pieces
    before, or from ``returns_routing_from`` on, up to the one that drew the piece's last token. The bytes are between
    engine and trainer (``longarc.models.routed_rows``). Empty where nobody asked."""


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
    num_recomputed_tokens: int = 0
    """Tokens that were computed again after a preemption since the engine started."""
    num_preemptions: int = 0
    """Times that a running sequence gave up its pages since the engine started."""
    num_free_pages: int = 0
    """Pages of the cache that hold nothing."""
    num_cached_pages: int = 0
    """Pages that nobody uses and that are kept for reuse."""
    num_used_pages: int = 0
    """Pages of running sequences."""
    num_updates: int = 0
    """Weight updates that are in use, or were, since the engine started."""
    update_s: float = 0.0
    """Time between asking for new weights and their use, all those updates together [seconds]."""
    update_pause_s: float = 0.0
    """Time in which no sequence could be decoded because weights were swapped, all those updates together [seconds]."""
    max_update_pause_s: float = 0.0
    """The longest such pause of one update [seconds]."""
    busy_s: float = 0.0
    """Time spent computing since the engine started [seconds]."""
    num_drafted: tuple[int, ...] = ()
    """Tokens that were drafted and verified since the engine started, by depth; empty where none are drafted. The first
    number counts the chains of drafts."""
    num_accepted: tuple[int, ...] = ()
    """Drafts that became sampled tokens, by depth."""
    instance_id: str = ""
    """Differs after every start of the engine, whose weights and cache are then its first ones; empty
    where the engine does not tell."""
    probe_gap: float | None = None
    """Mean difference between the engine's and the trainer's log-probabilities of the probe after the last weight
    update [nats]; None where none is made, because both compute with the same code."""

    @property
    def num_pages(self) -> int:
        """Pages of the cache; 0 where the engine does not tell."""
        return self.num_free_pages + self.num_cached_pages + self.num_used_pages

    @property
    def accept_length_tokens(self) -> float:
        """Mean tokens of a chain of drafts, the main model's own included; 0 before the first chain."""
        num_chains = self.num_drafted[0] if self.num_drafted else 0
        return 1 + sum(self.num_accepted) / num_chains if num_chains else 0.0

    @property
    def prefill_tokens_saved_frac(self) -> float:
        """Share of the prompt tokens asked for that did not have to be computed; 0 before the first prompt."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
