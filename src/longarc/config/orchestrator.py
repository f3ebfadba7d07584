"""How rollouts are scheduled against optimizer steps."""

from typing import Literal, Self

from pydantic import Field, model_validator

from longarc.config.settings import Settings


class RolloutLoopConfig(Settings):
    """How rollouts are scheduled against optimizer steps in an RL or distillation stage."""

    num_steps: int = Field(ge=1)
    """Length of the stage [optimizer steps]."""
    groups_per_step: int = Field(8, ge=1)
    """Groups trained in one optimizer step [groups]."""
    group_size: int = Field(8, ge=1)
    """Rollouts of one task that are compared with each other [trajectories]."""
    max_lag_steps: int = Field(0, ge=0)
    """Oldest behaviour policy that is trained on [optimizer steps]; 0 is strictly on-policy, and then
    sampling and training take turns. GLM-5 report, 4.1.2; the value is not published."""
    push_every_steps: int = Field(1, ge=1)
    """Optimizer steps between two hand-overs of weights to the engine [optimizer steps]; GLM-5 report,
    4.1.1; the value is not published."""
    consume: Literal["admission", "ready"] = "admission"
    """admission: groups are trained in the order they were started, which is reproducible; ready: the
    oldest finished groups are trained first and a straggler may be overtaken until its lag runs out."""
    max_inflight_groups: int | None = Field(None, ge=1)
    """Groups sampled, waiting or in training at once [groups]; None = as many as the lag allows, or with
    ``consume = "ready"`` half of the way there, so that stragglers have steps to spare."""
    max_concurrent_rollouts: int = Field(64, ge=1)
    """Rollouts in flight at once [trajectories]; further ones wait in the order of admission."""
    rollout_timeout_s: float = Field(600.0, gt=0)
    """Wall-clock budget of one rollout [seconds]; running out of it is the policy's doing and graded."""
    grader_timeout_s: float = Field(60.0, gt=0)
    """Wall-clock budget of grading one rollout [seconds]; running out of it is ``grader_failed``."""
    dynamic_sampling: bool = True
    """Whether groups whose rewards are all alike are replaced instead of trained; DAPO
    (arXiv:2503.14476), section 3.2. Needs a group_size of at least 2."""
    min_mean_reward: float | None = None
    """Groups whose mean reward is below are replaced instead of trained: too hard for now. None keeps them."""
    max_mean_reward: float | None = None
    """Groups whose mean reward is above are replaced instead of trained: too easy by now. None keeps them."""
    max_sampled_groups_per_step: int | None = Field(None, ge=1)
    """Groups sampled for one step at most, dropped ones included [groups]; a step trains what is left of
    them, one group at least. None = as many as ``groups_per_step`` needs, which
    takes ever longer as tasks are solved always or never. Needs ``max_lag_steps = 0``: further ahead,
    groups of later steps are in flight, and small steps would let them get too old."""
    max_dropped_groups_per_step: int | None = Field(None, ge=1)
    """Groups dropped in a row without an optimizer step before the stage gives up with an error
    [groups]; None = 32 * groups_per_step."""
    reset_optimizer_on_push: bool = False
    """Whether Adam's moments start anew after weights were pushed to the engine; GLM-5 report, 4.1.1."""
    watchdog_s: float = Field(900.0, gt=0)
    """Time without any progress after which the stage ends with an error naming what it waits for
    [seconds]."""

    @property
    def inflight_bound(self) -> int:
        """Most groups in flight that keep every group within ``max_lag_steps`` [groups].

        Of the lag, ``push_every_steps - 1`` steps may already be gone when a group starts, because
        the engine's weights are that old; each of the others lets one more step's groups run ahead.
        """
        return self.groups_per_step * (self.max_lag_steps - self.push_every_steps + 2)

    @model_validator(mode="after")
    def _lag_allows_pushes(self) -> Self:
        if self.max_lag_steps < self.push_every_steps - 1:
            raise ValueError(
                f"push_every_steps={self.push_every_steps} makes data up to "
                f"{self.push_every_steps - 1} steps old before it is sampled, but max_lag_steps="
                f"{self.max_lag_steps}: it must be at least push_every_steps - 1. Raise max_lag_steps "
                f"to {self.push_every_steps - 1} or lower push_every_steps to {self.max_lag_steps + 1}."
            )
        return self

    @model_validator(mode="after")
    def _inflight_fits_lag(self) -> Self:
        inflight = self.max_inflight_groups
        if inflight is not None and inflight > self.inflight_bound:
            raise ValueError(
                f"max_inflight_groups={inflight} would train on data older than max_lag_steps="
                f"{self.max_lag_steps}: at groups_per_step={self.groups_per_step} and "
                f"push_every_steps={self.push_every_steps} at most {self.inflight_bound} groups can be "
                f"in flight. Lower max_inflight_groups or raise max_lag_steps."
            )
        if inflight is not None and inflight < self.groups_per_step:
            raise ValueError(
                f"max_inflight_groups={inflight} is less than groups_per_step={self.groups_per_step}: "
                f"a step would wait forever for its last group. Use {self.groups_per_step} to "
                f"{self.inflight_bound}."
            )
        return self

    @model_validator(mode="after")
    def _sampling_bound_fits(self) -> Self:
        bound = self.max_sampled_groups_per_step
        if bound is not None and bound < self.groups_per_step:
            raise ValueError(
                f"max_sampled_groups_per_step={bound} is less than groups_per_step="
                f"{self.groups_per_step}: no step could be full. Use {self.groups_per_step} or more."
            )
        if bound is not None and self.max_lag_steps > 0:
            raise ValueError(
                f"max_sampled_groups_per_step={bound} needs max_lag_steps=0, but it is "
                f"{self.max_lag_steps}: groups of later steps would get too old while small steps are "
                f"trained. Leave it out, or set max_lag_steps to 0."
            )
        return self

    @model_validator(mode="after")
    def _watchdog_outlasts_rollouts(self) -> Self:
        longest_s = self.rollout_timeout_s + self.grader_timeout_s
        if self.watchdog_s <= longest_s:
            raise ValueError(
                f"watchdog_s={self.watchdog_s:g} would end the stage during one slow but legal rollout: "
                f"rollout_timeout_s + grader_timeout_s is {longest_s:g}. Raise watchdog_s above it or "
                f"lower rollout_timeout_s."
            )
        return self

    @model_validator(mode="after")
    def _filter_fits_group(self) -> Self:
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError(
                "dynamic_sampling=True drops groups whose rewards are all alike, which every group of "
                "group_size=1 is: nothing would ever be trained. Raise group_size to at least 2 or set "
                "dynamic_sampling=False."
            )
        low, high = self.min_mean_reward, self.max_mean_reward
        if self.group_size == 1 and (low is not None or high is not None):
            raise ValueError(
                f"min_mean_reward={low}, max_mean_reward={high} judge the difficulty of a task by the mean of its "
                f"group, which group_size=1 does not have. Raise group_size to at least 2 or leave them out."
            )
        if low is not None and high is not None and not low < high:
            raise ValueError(
                f"min_mean_reward={low} is not below max_mean_reward={high}: hardly a group could be trained. Choose "
                f"0.1 and 0.9 for instance."
            )
        return self
