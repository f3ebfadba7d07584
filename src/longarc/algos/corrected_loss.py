"""Clipped losses that correct for tokens sampled by something else: engine mismatch, and older weights."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.checks import check_positive
from longarc.algos.clipping import clipped_objective, constant_ratio, summed_loss
from longarc.algos.importance import keeps_sequence, truncated_weights
from longarc.algos.token_loss import TokenLoss


def weighted_clip_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    importance_weights: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t sg(k_t) min(r A, clip(r, 1-el, 1+eh) A)`` with any importance weights k.

    With :func:`~longarc.algos.importance.masked_weights` this is MIS at the level of tokens, sequences or
    geometric means. ``num_rejected`` counts tokens of weight 0, which stay in the normaliser.

    Source: GLM-5 (arXiv:2602.15763) eq. 1, with its pop replaced.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        proximal_logprobs: log pi [nats] under the weights at the start of the step; constant.
        importance_weights: k; constant.
        advantages: A; constant.
        train_mask: True on trained tokens.
        eps_low: lower clip of r is ``1 - eps_low``.
        eps_high: upper clip of r is ``1 + eps_high``.
        dual_clip: above ``1 + eps_high``; saturates negative advantages at this ratio. None = off.
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.
    """
    weights = importance_weights.detach().masked_fill(~train_mask, 0.0)
    is_out = weights == 0
    log_ratio = (policy_logprobs - proximal_logprobs.detach()).masked_fill(is_out, 0.0)
    objective, _ = clipped_objective(
        log_ratio,
        advantages.masked_fill(~train_mask, 0.0),
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
    )
    return summed_loss(
        torch.where(is_out, 0.0, weights * objective), train_mask, is_out, token_weights
    )


def truncated_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    cap: float,
    eps_low: float,
    eps_high: float,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t min(rho_t, cap) min(r A, clip(r) A)``: PPO with truncated importance sampling.

    ``rho = pi_proximal / mu`` is a constant. ``num_rejected`` counts tokens whose rho was cut; they keep a gradient.

    Source: TIS between engine and trainer, as slime's ``--use-tis``; see
    :func:`~longarc.algos.importance.truncated_weights`.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        proximal_logprobs: log pi [nats] under the weights at the start of the step; constant.
        behaviour_logprobs: log mu [nats] that the engine recorded; constant.
        advantages: A; constant.
        train_mask: True on trained tokens.
        cap: largest rho; 2 is usual.
        eps_low: lower clip of r is ``1 - eps_low``.
        eps_high: upper clip of r is ``1 + eps_high``.
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.
    """
    rho = constant_ratio(proximal_logprobs, behaviour_logprobs, train_mask)
    out = weighted_clip_loss(
        policy_logprobs,
        proximal_logprobs,
        truncated_weights(rho, cap=cap),
        advantages,
        train_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        token_weights=token_weights,
    )
    return replace(out, num_rejected=(rho > cap).sum().to(out.normaliser.dtype))


def decoupled_ppo_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    eps_low: float,
    eps_high: float,
    behaviour_cap: float | None = None,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t sg(pi_proximal / mu) min(u A, clip(u, 1-el, 1+eh) A)`` with ``u = pi / pi_proximal``.

    The trust region is around the proximal policy and the correction against the behaviour policy. With
    proximal = behaviour this is PPO; with proximal = policy it is REINFORCE with importance weights.

    Source: AReaL (arXiv:2505.24298); A-3PO (arXiv:2512.06547).

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        proximal_logprobs: log pi [nats] at the centre of the trust region; constant.
        behaviour_logprobs: log mu [nats] that the engine recorded; constant.
        advantages: A; constant.
        train_mask: True on trained tokens.
        eps_low: lower clip of u is ``1 - eps_low``.
        eps_high: upper clip of u is ``1 + eps_high``.
        behaviour_cap: tokens whose ``pi_proximal / mu`` is above it are rejected; they stay in the normaliser.
            None = off.
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.

    Raises:
        ConfigError: the bounds exclude 1, or the cap is not above 0.
    """
    weights = constant_ratio(proximal_logprobs, behaviour_logprobs, train_mask)
    if behaviour_cap is not None:
        check_positive("behaviour_cap", behaviour_cap)
        weights = weights.masked_fill(weights > behaviour_cap, 0.0)
    return weighted_clip_loss(
        policy_logprobs,
        proximal_logprobs,
        weights,
        advantages,
        train_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        token_weights=token_weights,
    )


def sequence_masked_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    sequence_ids: Int[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    delta: float,
    eps_low: float,
    eps_high: float,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t M_t min(r A, clip(r, 1-el, 1+eh) A)`` with ``r = pi / mu`` and OPSM's mask M.

    ``num_rejected`` counts masked and clipped tokens.

    Source: OPSM, DeepSeek-V3.2 (arXiv:2512.02556), section 3.1; see
    :func:`~longarc.algos.importance.keeps_sequence`.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        behaviour_logprobs: log mu [nats] that the engine recorded; constant.
        advantages: A; constant.
        sequence_ids: which sequence each token belongs to; all of its tokens must be here.
        train_mask: True on trained tokens.
        delta: sequences with a negative advantage are dropped beyond this mean divergence [nats per token].
        eps_low: lower clip of r is ``1 - eps_low``.
        eps_high: upper clip of r is ``1 + eps_high``.
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.

    Raises:
        ConfigError: delta is below 0, or the bounds exclude 1.
    """
    log_ratio = policy_logprobs - behaviour_logprobs.detach()
    is_kept = keeps_sequence(log_ratio.detach(), advantages, train_mask, sequence_ids, delta=delta)
    is_out = ~(train_mask & is_kept)
    objective, is_flat = clipped_objective(
        log_ratio.masked_fill(is_out, 0.0),
        advantages.masked_fill(is_out, 0.0),
        eps_low=eps_low,
        eps_high=eps_high,
    )
    return summed_loss(objective, train_mask, is_out | is_flat, token_weights)
