"""What every stage that samples from a policy and learns from it shares; and how a policy is sampled."""

import math
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from longarc.config.orchestrator import RolloutLoopConfig
from longarc.config.settings import Settings
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.records.sampling import MIN_TEMPERATURE, RoutingReplay, UpdatePolicy


class TaskShare(Settings):
    """How much of a stage one task family gets, and how hard its tasks are there."""

    share_frac: float = Field(1.0, gt=0)
    """Relative share; shares are normalised over the stage."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword settings for the family, over those of the recipe's ``tasks``."""


class RolloutConfig(Settings):
    """How the policy is sampled in an RL or evaluation stage."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; training scores under the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the likeliest tokens that reach this share; training scores among the same tokens, which are recorded."""
    top_k: int = Field(0, ge=0)
    """Draw from so many of the likeliest tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Draw from tokens with at least this share of the likeliest one's probability; 0 keeps all."""
    max_new_tokens: int = Field(96, ge=1)
    """Budget of one turn [tokens]."""
    max_context_tokens: int = Field(1024, ge=16)
    """Budget of a whole rollout, prompts and observations included [tokens]."""
    on_update: UpdatePolicy | None = None
    """A turn that is being sampled when new weights arrive goes on under them with its old cache (``continue``), computes
    its cache again before it goes on (``recompute``), or ends under the old weights, for which the engine keeps a second copy
    and further updates wait (``finish``). None leaves it to the engine: the embedded one continues."""
    routing_replay: RoutingReplay = "none"
    """What of the engine's routing training computes with, in place of its own choices (rollout routing replay, R3):
    ``experts`` of each token, or ``experts_and_keys``, also what its indexers selected. The engine then keeps them beside
    the rows of its cache and they are recorded with the tokens. LongArc's engine and trainer choose alike for the same
    weights, so this is for weights that differ: rollouts in FP8, or turns that an update caught. For glm_moe_dsa."""

    @field_validator("temperature")
    @classmethod
    def _is_sampled_with(cls, temperature: float) -> float:
        if temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf:
            return temperature
        raise ValueError(f"is 0, or at least {MIN_TEMPERATURE} and finite")


class OverlongConfig(Settings):
    """A reward that falls before a length limit is reached: soft overlong punishment, DAPO (arXiv:2503.14476)."""

    max_tokens: int = Field(ge=1)
    """Trained tokens of a rollout from which on it loses 1 of its reward [tokens]."""
    cache_tokens: int = Field(ge=1)
    """Tokens before that over which the loss grows from 0 to 1 [tokens]."""

    @model_validator(mode="after")
    def _interval_exists(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} begin before the first of max_tokens={self.max_tokens}; lower "
                f"cache_tokens to at most max_tokens"
            )
        return self

    def check_reach(self, rollout: RolloutConfig) -> None:
        """Refuse a punishment that no rollout is long enough for.

        Raises:
            ValueError: names the lengths.
        """
        first, longest = self.max_tokens - self.cache_tokens, rollout.max_context_tokens
        if first >= longest:
            raise ValueError(
                f"overlong punishes rollouts of more than max_tokens - cache_tokens = {first} tokens, which "
                f"rollout.max_context_tokens={longest} never lets through; lower overlong.max_tokens, or leave "
                f"overlong out"
            )


class SamplingStageConfig(Settings):
    """Rollouts in, batches out, a trainer behind them: what RL, distillation and value pre-training share."""

    kind: str
    """Which stage this is."""
    tasks: dict[str, TaskShare] = Field(min_length=1)
    """Families and their shares of the groups."""
    loop: RolloutLoopConfig
    """How rollouts are scheduled against training steps."""
    rollout: RolloutConfig = RolloutConfig()
    """How the policy is sampled."""
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward and backward [tokens]."""
    activations: ActivationConfig = ActivationConfig()
    """What is kept between forward and backward; memory and time, not results."""
    trainer_process: bool = False
    """Whether the trainer runs in a process of its own, so that sampling and training overlap."""
    checkpoint_every_steps: int = Field(20, ge=1)
    """A crash costs at most this many recomputed steps [optimizer steps]."""

    @model_validator(mode="after")
    def _longest_rollout_is_trained(self) -> Self:
        longest = self.rollout.max_context_tokens
        if self.micro_batch_tokens < longest:
            raise ValueError(
                f"micro_batch_tokens={self.micro_batch_tokens} has no room for a rollout of "
                f"rollout.max_context_tokens={longest}; raise it to at least {longest}, or lower the context"
            )
        return self

    @model_validator(mode="after")
    def _samples_something(self) -> Self:
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature=0 always takes the likeliest token: there is nothing to compare, and "
                "the policy's distribution has no gradient. Use a temperature above 0; 1 is usual."
            )
        return self


def takes_turns(stage: SamplingStageConfig) -> bool:
    """Say whether the engine rests while the trainer trains, so that each in turn may have all cores."""
    return not stage.trainer_process and stage.loop.max_lag_steps == 0


def check_warmup(optimizer: OptimizerConfig, num_steps: int) -> None:
    """Refuse a warm-up that never ends.

    Raises:
        ValueError: names both lengths.
    """
    if optimizer.warmup_steps > num_steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is longer than the stage of {num_steps} "
            f"steps, which would never reach its rate; lower it or raise num_steps"
        )
