"""Advantages from comparing rewards: with the other members of a group, or with earlier rollouts of the same kind."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from longarc.errors import ConfigError


def group_advantages(
    rewards: Sequence[float] | Float[Tensor, " members"],
    *,
    normalise: Literal["std", "mean"] = "std",
    eps: float = 1e-6,
) -> Float[Tensor, " members"]:
    """Return ``(R_i - mean) / (std + eps)`` over one group, in float64.

    The deviation has ddof 1. A group whose deviation is at most ``eps`` carries no signal and gets
    zeros: float noise must not be blown up to unit size. So does a group of one, whose deviation is
    undefined.

    Source: GLM-5 (arXiv:2602.15763) section 3.2; the mean-only form is GLM-4.5's.

    Args:
        rewards: one reward per member; repeated members (group repair) stand in it repeatedly.
        normalise: "std" divides by the deviation, "mean" only subtracts the mean.
        eps: added to the deviation, and the threshold below which it counts as zero.
    """
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if len(values) < 2:
        return torch.zeros_like(values)
    centred = values - values.mean()
    std = values.std(correction=1)
    if std <= eps:
        return torch.zeros_like(values)
    return centred if normalise == "mean" else centred / (std + eps)


def leave_one_out_baselines(
    rewards: Sequence[float] | Float[Tensor, " members"],
) -> Float[Tensor, " members"]:
    """Return ``b_i = sum_{j != i} R_j / (G - 1)``, the mean of everybody else, in float64.

    It does not depend on the member's own reward, so that subtracting it leaves the policy gradient
    unbiased. A group of one has nobody else; its baseline is its own reward, and its advantage 0.

    Source: Kool et al., "Buy 4 REINFORCE samples, get a baseline for free" (2019).

    Args:
        rewards: one reward per member; the copies of a repeated member (group repair) are in each
            other's baseline.
    """
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if len(values) < 2:
        return values.clone()
    return (values.sum() - values) / (len(values) - 1)


def rloo_advantages(
    rewards: Sequence[float] | Float[Tensor, " members"],
) -> Float[Tensor, " members"]:
    """Return ``R_i - b_i = G / (G - 1) (R_i - mean)`` with the leave-one-out baseline, in float64.

    Source: RLOO, Ahmadian et al. (arXiv:2402.14740).

    Args:
        rewards: see :func:`leave_one_out_baselines`.
    """
    values = torch.as_tensor(rewards, dtype=torch.float64)
    return values - leave_one_out_baselines(values)


def running_mean_advantages(
    rewards: Sequence[float], history: Sequence[float], *, window: int
) -> tuple[Float[Tensor, " rollouts"], tuple[float, ...]]:
    """Return ``R_i - mean(last w rewards before)`` and the history that the next call continues from.

    A baseline for single rollouts, without a critic. All rewards of a call are compared with what was
    seen before it; with nothing seen yet they are compared with each other.

    Source: the ablation of SAO (arXiv:2607.07508), a window of 8 for each prompt.

    Args:
        rewards: of the rollouts of one step that share a baseline, in a fixed order.
        history: rewards before, the newest last.
        window: w [rollouts], at least 1.

    Raises:
        ConfigError: the window is empty.
    """
    if window < 1:
        raise ConfigError(f"window={window} remembers nothing; choose at least 1, 8 for instance")
    values = torch.tensor([float(reward) for reward in rewards], dtype=torch.float64)
    recent = [float(reward) for reward in history][-window:]
    known = recent or values.tolist()
    baseline = sum(known) / len(known) if known else 0.0
    return values - baseline, tuple([*recent, *values.tolist()][-window:])
