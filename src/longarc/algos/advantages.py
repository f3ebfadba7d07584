"""Advantages from comparing the members of a group."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


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
