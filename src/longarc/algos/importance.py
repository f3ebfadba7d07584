"""Importance weights that select: a ratio outside its band contributes zero, never ``inf * 0``.

Ratios are constants in every loss that uses these weights.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def icepop_weights(
    ratio: Float[Tensor, " tokens"], *, low: float, high: float
) -> Float[Tensor, " tokens"]:
    """Return ``rho if low <= rho <= high else 0`` (closed band).

    Source: GLM-5 (arXiv:2602.15763) eq. 1 with low = 1/beta, high = beta; Ring-1T uses [0.5, 5].
    """
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def double_sided_weights(
    ratio: Float[Tensor, " tokens"], *, low: float, high: float
) -> Float[Tensor, " tokens"]:
    """Return ``r if low < r < high else 0`` (open band).

    Source: GLM-5 (arXiv:2602.15763) eq. 5. The bounds are bounds and not epsilons: ``1 - 0.8`` is
    0.19999999999999996 in float64 and would let 0.2 through.
    """
    return torch.where((ratio > low) & (ratio < high), ratio, 0.0)


def truncated_weights(ratio: Float[Tensor, " tokens"], *, cap: float) -> Float[Tensor, " tokens"]:
    """Return ``min(rho, cap)``: biased, bounded variance.

    Source: truncated importance sampling; 2 is the usual cap.
    """
    return ratio.clamp(max=cap)
