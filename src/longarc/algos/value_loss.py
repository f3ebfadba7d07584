"""What a critic learns from, and how well it explains what it is for."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from longarc.algos.checks import check_positive
from longarc.algos.clipping import summed_loss
from longarc.algos.token_loss import TokenLoss

_ROUNDING = 1e-12
"""Of a float64 sum over a rollout, relative to its size."""


def clipped_value_loss(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    clip: float | None,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``sum_t w_t max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)``, without a factor 1/2.

    A value that has left the range around the old one gets no gradient, unless it is further from the target than the
    clipped one. ``num_rejected`` counts tokens without a gradient for that reason.

    Source: PPO's value clipping as in slime's ``value_loss_function``; SAO and CompactionRL do not say which form they
    use.

    Args:
        values: V of each token, under the weights being trained; carries gradient.
        old_values: V of each token at the start of the step; constant. Not read with ``clip=None``.
        returns: R of each token, the critic's target; constant.
        train_mask: True on trained tokens.
        clip: c, how far V may move from V_old in one step; None is plain squared error.
        token_weights: 1 for a token mean (the default).

    Raises:
        ConfigError: the clip range is not above 0.
    """
    target = returns.detach().masked_fill(~train_mask, 0.0)
    current = values.masked_fill(~train_mask, 0.0)
    error = (current - target).square()
    if clip is None:
        return summed_loss(-error, train_mask, torch.zeros_like(train_mask), token_weights)
    check_positive("clip", clip)
    old = old_values.detach().masked_fill(~train_mask, 0.0)
    moved = current - old
    clipped_error = (old + moved.clamp(-clip, clip) - target).square()
    is_flat = (moved.abs() > clip) & (clipped_error > error)
    return summed_loss(-torch.maximum(error, clipped_error), train_mask, is_flat, token_weights)


def value_cross_entropy_loss(
    value_logits: Float[Tensor, " tokens"],
    outcomes: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t (R log V + (1 - R) log(1 - V))`` with ``V = sigmoid(logit)``.

    For outcomes that are 0 or 1, where the value is the probability of success.

    Source: the critic of WebRL (arXiv:2411.02337).

    Args:
        value_logits: logit of V of each token; carries gradient.
        outcomes: R of the trajectory of each token, 0 to 1; constant.
        train_mask: True on trained tokens.
        token_weights: 1 for a token mean (the default).
    """
    loss = binary_cross_entropy_with_logits(
        value_logits.masked_fill(~train_mask, 0.0),
        outcomes.detach().masked_fill(~train_mask, 0.0),
        reduction="none",
    )
    return summed_loss(-loss, train_mask, torch.zeros_like(train_mask), token_weights)


def explained_variance(
    values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
) -> float:
    """Return ``1 - Var(R - V) / Var(R)`` over trained tokens, in float64.

    1 is a perfect critic, 0 one that knows only the mean, below 0 one that is worse than that. NaN where all returns
    are alike: there is nothing to explain.

    Source: the diagnostic of PPO implementations; SAO (arXiv:2607.07508) reports 0.60 with two critic updates per
    policy update and 0.52 with one.
    """
    target = returns.detach().double()[train_mask]
    error = target - values.detach().double()[train_mask]
    if not len(target):
        return float("nan")
    variance = target.var(correction=0).item()
    # Returns are sums of deltas and values: those that are alike differ by their rounding.
    if variance <= (_ROUNDING * (1.0 + target.abs().max().item())) ** 2:
        return float("nan")
    return 1.0 - error.var(correction=0).item() / variance
