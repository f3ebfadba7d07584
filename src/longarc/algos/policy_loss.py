"""Policy-gradient losses. Each returns a sum and a normaliser and divides by nothing.

Everything is masked before it is multiplied: ``0 * inf`` is NaN, and a token that is not trained on
may carry any log-probability at all.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longarc.algos.importance import double_sided_weights, icepop_weights
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
    """
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
    live_ratio = log_ratio.masked_fill(is_flat, 0.0).exp()
    return torch.where(is_flat, flat_ratio, live_ratio) * advantages, is_flat


def ppo_clip_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t min(r A, clip(r, 1-el, 1+eh) A)`` with ``r = pi / pi_proximal``.

    ``num_rejected`` counts clipped tokens. Source: see :func:`clipped_objective`.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        proximal_logprobs: log pi [nats] under the weights at the start of the step; constant.
        advantages: A; constant.
        train_mask: True on trained tokens.
        eps_low: the ratio's lower bound is ``1 - eps_low``; 0.2 in GLM-5.
        eps_high: the ratio's upper bound is ``1 + eps_high``; 0.28 in GLM-5.
        dual_clip: above 1; saturates negative advantages at this ratio. None = off.
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.
    """
    log_ratio = (policy_logprobs - proximal_logprobs.detach()).masked_fill(~train_mask, 0.0)
    objective, is_flat = clipped_objective(
        log_ratio,
        advantages.masked_fill(~train_mask, 0.0),
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
    )
    return _token_loss(objective, train_mask, is_flat, token_weights)


def icepop_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    low: float,
    high: float,
    eps_low: float,
    eps_high: float,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t pop(rho_t) min(r A, clip(r) A)``, the loss of reasoning RL.

    ``rho = pi_proximal / mu`` compares trainer and engine on the same weights and is a constant;
    ``r = pi / pi_proximal`` carries the gradient. ``num_rejected`` counts popped-out tokens.

    Source: GLM-5 (arXiv:2602.15763) eq. 1, beta = 2: band [0.5, 2]; closed, see :func:`icepop_weights`.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        proximal_logprobs: log pi [nats] under the weights at the start of the step; constant.
        behaviour_logprobs: log mu [nats] that the engine recorded; constant.
        advantages: A; constant.
        train_mask: True on trained tokens.
        low: lower end of the band for rho, closed.
        high: upper end of the band for rho, closed.
        eps_low: lower clip of r is ``1 - eps_low``.
        eps_high: upper clip of r is ``1 + eps_high``.
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.
    """
    mismatch = (proximal_logprobs - behaviour_logprobs).detach().masked_fill(~train_mask, 0.0)
    pop = icepop_weights(mismatch.exp(), low=low, high=high)
    is_out = pop == 0
    log_ratio = (policy_logprobs - proximal_logprobs.detach()).masked_fill(
        ~train_mask | is_out, 0.0
    )
    objective, _ = clipped_objective(
        log_ratio, advantages.masked_fill(~train_mask, 0.0), eps_low=eps_low, eps_high=eps_high
    )
    return _token_loss(torch.where(is_out, 0.0, pop * objective), train_mask, is_out, token_weights)


def double_sided_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    low: float,
    high: float,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t sg(f(r_t)) A_t log pi(a_t)``, the loss of asynchronous agentic RL.

    ``r = pi / mu`` against the behaviour policy as the engine reported it, ``f(r) = r`` inside the
    open band and 0 outside, whatever the sign of the advantage. No proximal policy is needed.
    Without the stop-gradient this is not a policy gradient: with a constant advantage it descends
    the entropy.

    Source: GLM-5 (arXiv:2602.15763) eq. 3-5, double-sided importance sampling.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        behaviour_logprobs: log mu [nats] that the engine recorded; constant.
        advantages: A; constant.
        train_mask: True on trained tokens.
        low: lower end of the trust region, open; 0.7 for math, 0.2 for code (SAO).
        high: upper end of the trust region, open; 6.0 for math, 4.0 for code (SAO).
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.
    """
    log_ratio = (policy_logprobs - behaviour_logprobs).detach().masked_fill(~train_mask, 0.0)
    weights = double_sided_weights(log_ratio.exp(), low=low, high=high)
    is_out = weights == 0
    # Masked before the product: a rejected token may have log-probability -inf.
    logprobs = policy_logprobs.masked_fill(~train_mask | is_out, 0.0)
    objective = weights * advantages.masked_fill(~train_mask, 0.0) * logprobs
    return _token_loss(objective, train_mask, is_out, token_weights)


def _token_loss(
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
