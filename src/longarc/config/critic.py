"""Settings of a critic, of the advantages made from its values, and of the stage that trains it before a policy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from longarc.config.rollout import OverlongConfig, SamplingStageConfig, check_warmup
from longarc.config.settings import Settings
from longarc.config.training import OptimizerConfig

DEFAULT_ALPHA = 1.5
"""Of SAO and CompactionRL; VAPO has 0.05."""


class CriticConfig(Settings):
    """A copy of the policy with a value head: what a rollout is expected to earn, token by token."""

    start: str | None = None
    """Earlier stage whose critic goes on here; None starts from the weights of the policy, with a new value head."""
    trains: Literal["feed_forward", "all"] = "feed_forward"
    """What of it is trained beside the value head: the projections of its feed-forward layers, experts above all, with
    attention frozen (SAO), or everything but indexers."""
    updates_per_step: int = Field(2, ge=1)
    """Updates of the critic for each of the policy, from the same tokens [optimizer steps]; 2 in SAO."""
    clip: float | None = Field(0.2, gt=0)
    """How far a value may move from where it was at the start of the step [reward units]; what moved further gets no
    gradient. None is plain squared error. Neither SAO nor CompactionRL says what it does."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of the reward per trained token; 1 in VAPO, not published for SAO and CompactionRL."""
    bootstraps_truncated: bool = False
    """Whether a rollout that a limit ended (``truncated_tokens``, ``truncated_turns``, ``timed_out``) is worth its
    reward and the value of the state that it was left in. False takes the reward alone, so that running into a limit is
    never worth more than what was reached before it."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3, weight_decay=0.0)
    """How the critic is updated; in SAO its rate is five times the policy's."""

    @model_validator(mode="after")
    def _clip_can_act(self) -> Self:
        if self.updates_per_step == 1 and self.clip is not None and "clip" in self.model_fields_set:
            raise ValueError(
                f"clip={self.clip} has no effect with updates_per_step=1: no value has moved before the only update "
                f"of a step. Leave it out, or raise updates_per_step"
            )
        return self

    def check_length(self, num_steps: int) -> None:
        """Refuse a warm-up that is longer than the stage.

        Raises:
            ValueError: names both lengths.
        """
        try:
            check_warmup(self.optimizer, num_steps)
        except ValueError as error:
            raise ValueError(f"critic: {error}") from error


class GaeConfig(Settings):
    """Generalised advantage estimation over the trained tokens of a rollout; observations are stepped over."""

    alpha: float | None = Field(None, gt=0)
    """Length-adaptive lambda = 1 - 1 / (alpha l) for l trained tokens, at least 0: 1.5 in SAO and CompactionRL, 0.05 in
    VAPO. None is 1.5, unless ``lam`` is given."""
    lam: float | None = Field(None, ge=0, le=1)
    """One lambda for every rollout, in place of ``alpha``: 1 is the Monte-Carlo return, 0 one step ahead."""
    lambda_scope: Literal["rollout", "segment"] = "rollout"
    """Whose trained tokens l counts where a rollout has several segments: with ``segment``, short summaries lose nearly
    all credit. Not published."""

    @model_validator(mode="after")
    def _one_lambda(self) -> Self:
        if self.alpha is not None and self.lam is not None:
            raise ValueError(
                f"alpha={self.alpha} and lam={self.lam} both say what lambda is; give one of them, alpha for a lambda "
                f"that grows with the length of the rollout"
            )
        if self.lam is not None and self.lambda_scope == "segment":
            raise ValueError(
                f'lambda_scope="segment" has no effect with lam={self.lam}, which is the same for every length; leave it '
                f"out, or give alpha"
            )
        return self

    @property
    def length_alpha(self) -> float | None:
        """The alpha that counts; None where lambda is the same for every length."""
        return DEFAULT_ALPHA if self.alpha is None and self.lam is None else self.alpha


class ValuePretrainConfig(SamplingStageConfig):
    """A critic learns what the policy earns, while the policy stays as it is; VAPO, SAO."""

    kind: Literal["value_pretrain"] = "value_pretrain"
    """Which stage this is."""
    critic: CriticConfig = CriticConfig()
    """What is trained."""
    overlong: OverlongConfig | None = None
    """What long rollouts lose of their reward, as in the stage that the critic is for; None for nothing."""

    @model_validator(mode="after")
    def _learns_from_every_rollout(self) -> Self:
        self.critic.check_length(self.loop.num_steps)
        if self.overlong is not None:
            self.overlong.check_reach(self.rollout)
        if self.rollout.routing_replay != "none":
            raise ValueError(
                f"rollout.routing_replay={self.rollout.routing_replay!r} has no effect: the policy is not computed, and "
                f"the critic routes by its own weights. Leave it out."
            )
        loop = self.loop
        if (
            loop.dynamic_sampling
            or loop.min_mean_reward is not None
            or loop.max_mean_reward is not None
        ):
            raise ValueError(
                f"loop.dynamic_sampling={loop.dynamic_sampling}, loop.min_mean_reward={loop.min_mean_reward}, "
                f"loop.max_mean_reward={loop.max_mean_reward} drop groups by their rewards: the critic would learn that "
                f"what is always solved, or never, does not exist. Set loop.dynamic_sampling=false and leave the others "
                f"out."
            )
        if loop.reset_optimizer_on_push or loop.push_every_steps != 1:
            raise ValueError(
                f"loop.reset_optimizer_on_push={loop.reset_optimizer_on_push}, loop.push_every_steps="
                f"{loop.push_every_steps} have no effect: no weights are pushed, because the policy stays as it is. "
                f"Leave them out."
            )
        return self
