"""From values to advantages and targets: every rollout as a whole, whoever computed the values of its segments.

::

    values of all segments of the step --> by rollout, segments in the order of time --> GAE --> per segment again

Only trained tokens take part, so observations are stepped over: the value of the first token behind one has seen it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from longarc.algos.gae import cross_trajectory_gae
from longarc.errors import ContractError
from longarc.records.outcome import Outcome
from longarc.records.trajectory import Trajectory
from longarc.trainer.credit import Column, TrainItem

TRUNCATED = frozenset({Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS, Outcome.TIMED_OUT})
"""Rollouts that a limit ended and not the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeSettings:
    """How credit is spread over the tokens of a rollout."""

    gamma: float = 1.0
    """Discount per trained token."""
    alpha: float | None = 1.5
    """lambda = 1 - 1 / (alpha l) for l trained tokens; None takes ``lam``."""
    lam: float | None = None
    """One lambda for every rollout; None takes ``alpha``."""
    lambda_scope: Literal["rollout", "segment"] = "rollout"
    """Whose trained tokens l counts."""
    bootstraps_truncated: bool = False
    """Whether a rollout that a limit ended is worth its reward and the value of the state that it was left in."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueCredit:
    """What the tokens of a step are worth: a column for each segment, in the order of the step."""

    advantages: list[Column]
    returns: list[Column]
    """The critic's targets."""


def ends_in_a_cut(items: Sequence[TrainItem], settings: GaeSettings) -> list[bool]:
    """Say of each segment whether the value behind its last token counts: where a limit ended its rollout there."""
    is_cut = [False] * len(items)
    if settings.bootstraps_truncated:
        for members in _rollouts(items):
            last = members[-1]
            is_cut[last] = items[last].trajectory.outcome in TRUNCATED
    return is_cut


def value_credit(
    items: Sequence[TrainItem],
    values: Sequence[Column],
    settings: GaeSettings,
    *,
    penalties: Mapping[str, float],
) -> ValueCredit:
    """Spread the reward of every rollout over its trained tokens.

    Source: SAO (arXiv:2607.07508) for rollouts of one segment, CompactionRL (arXiv:2607.05378) for several.

    Args:
        items: the segments of the step, those of a trajectory in any order.
        values: of each segment, V of its trained tokens at their positions. Behind the last token stands one more,
            where :func:`ends_in_a_cut` says so.
        settings: see the fields.
        penalties: what the reward of a trajectory loses, by its id.

    Raises:
        ContractError: a trajectory has no reward.
        ConfigError: gamma, lambda or alpha is out of range.
    """
    is_cut = ends_in_a_cut(items, settings)
    advantages: list[Column] = [np.zeros(len(item.segment.token_ids)) for item in items]
    returns: list[Column] = [np.zeros(len(item.segment.token_ids)) for item in items]
    for members in _rollouts(items):
        last = members[-1]
        trajectory = items[last].trajectory
        behind = float(values[last][-1]) if is_cut[last] else 0.0
        positions = [np.flatnonzero(items[m].segment.train_mask) for m in members]
        own_advantages, own_returns = cross_trajectory_gae(
            [values[m][own].tolist() for m, own in zip(members, positions, strict=True)],
            terminal_reward=_reward(trajectory) + penalties.get(trajectory.id, 0.0),
            gamma=settings.gamma,
            alpha=settings.alpha,
            lam=settings.lam,
            lambda_scope=settings.lambda_scope,
            bootstrap_value=behind,
        )
        for index, own, advantage, target in zip(
            members, positions, own_advantages, own_returns, strict=True
        ):
            advantages[index][own] = advantage.numpy()
            returns[index][own] = target.numpy()
    return ValueCredit(advantages=advantages, returns=returns)


def _rollouts(items: Sequence[TrainItem]) -> list[list[int]]:
    """Return the indices of the segments of each trajectory, by time."""
    rollouts: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        rollouts.setdefault(item.trajectory.id, []).append(index)
    return [sorted(own, key=lambda i: items[i].segment.order) for own in rollouts.values()]


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ContractError(
            f"trajectory {trajectory.id} has no reward for a critic to learn from; grade it before it reaches the "
            f"trainer"
        )
    return trajectory.reward
