"""What the losses of policies share: the clipped objective, constant ratios, and the weighted sum.

Everything is masked before it is multiplied: ``0 * inf`` is NaN, and a token that is not trained on
may carry any log-probability at all.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longarc.algos.checks import check_clip
from longarc.algos.token_loss import TokenLoss


def clipped_objective(
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Return ``min(r A, clip(r, 1-el, 1+eh) A)`` and where it is flat (clipped, zero gradient).

    Written as a selection between a live and a flat branch, so that a ratio that overflows in the
    flat branch cannot turn the gradient into ``0 * inf``. Exactly on a bound the gradient flows.

    Source: PPO (arXiv:1707.06347) eq. 7; asymmetric bounds: DAPO (arXiv:2503.14476); dual clip:
    arXiv:1912.09729 (A < 0 saturates at ``dual_clip * A``).

    Raises:
        ConfigError: the bounds exclude 1, or the dual clip is not above them.
    """
    check_clip(eps_low, eps_high, dual_clip)
    low, high = 1.0 - eps_low, 1.0 + eps_high
    ratio = log_ratio.detach().exp()
    too_high = (advantages > 0) & (ratio > high)
    too_low = (advantages < 0) & (ratio < low)
    is_flat = too_high | too_low
    flat_ratio = torch.full_like(ratio, low).masked_fill(too_high, high)
    if dual_clip is not None:
        saturated = (advantages < 0) & (ratio > dual_clip)
        flat_ratio = flat_ratio.masked_fill(saturated, dual_clip)
        is_flat = is_flat | saturated
    # An advantage of 0 earns 0 whatever the ratio is, and with one that overflows the product would be NaN.
    live_ratio = log_ratio.masked_fill(is_flat | (advantages == 0), 0.0).exp()
    return torch.where(is_flat, flat_ratio, live_ratio) * advantages, is_flat


def constant_ratio(
    logprobs: Float[Tensor, " tokens"],
    other_logprobs: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
) -> Float[Tensor, " tokens"]:
    """Return the ratio of two policies as a constant, 1 on tokens that are not trained."""
    return (logprobs - other_logprobs).detach().masked_fill(~train_mask, 0.0).exp()


def summed_loss(
    objective: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    is_rejected: Bool[Tensor, " tokens"],
    token_weights: Float[Tensor, " tokens"] | None,
) -> TokenLoss:
    """Weigh and add up; ``objective`` is to be maximised."""
    if token_weights is None:
        token_weights = torch.ones_like(objective)
    weights = token_weights.to(objective.dtype).masked_fill(~train_mask, 0.0)
    return TokenLoss(
        loss_sum=-(weights * objective.masked_fill(~train_mask, 0.0)).sum(),
        normaliser=weights.sum(),
        num_rejected=(train_mask & is_rejected).sum().to(objective.dtype),
    )
