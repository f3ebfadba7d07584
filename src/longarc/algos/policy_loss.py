"""Policy-gradient losses. Each returns a sum and a normaliser and divides by nothing.

Everything is masked before it is multiplied: ``0 * inf`` is NaN, and a token that is not trained on
may carry any log-probability at all.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.checks import check_clip
from longarc.algos.clipping import clipped_objective, constant_ratio, summed_loss
from longarc.algos.corrected_loss import weighted_clip_loss
from longarc.algos.importance import double_sided_weights, icepop_weights
from longarc.algos.sequences import sequence_means
from longarc.algos.token_loss import TokenLoss


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

    ``num_rejected`` counts clipped tokens.

    Source: PPO (arXiv:1707.06347) eq. 7; for the bounds and the dual clip see
    :func:`~longarc.algos.clipping.clipped_objective`.

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
    return summed_loss(objective, train_mask, is_flat, token_weights)


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

    Source: GLM-5 (arXiv:2602.15763) eq. 1, beta = 2: band [0.5, 2]; closed, see :func:`~longarc.algos.importance.icepop_weights`.

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
    pop = icepop_weights(
        constant_ratio(proximal_logprobs, behaviour_logprobs, train_mask), low=low, high=high
    )
    return weighted_clip_loss(
        policy_logprobs,
        proximal_logprobs,
        pop,
        advantages,
        train_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        token_weights=token_weights,
    )


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
    ratio = constant_ratio(policy_logprobs, behaviour_logprobs, train_mask)
    weights = double_sided_weights(ratio, low=low, high=high)
    is_out = weights == 0
    # Masked before the product: a rejected token may have log-probability -inf.
    logprobs = policy_logprobs.masked_fill(~train_mask | is_out, 0.0)
    objective = weights * advantages.masked_fill(~train_mask, 0.0) * logprobs
    return summed_loss(objective, train_mask, is_out, token_weights)


def cispo_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    eps_low: float,
    eps_high: float,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t sg(clip(r_t, 1-el, 1+eh)) A_t log pi(a_t)`` with ``r = pi / pi_proximal``.

    Double-sided importance sampling with a clamp in place of the mask: every token keeps a gradient.
    ``num_rejected`` counts clamped tokens.

    Source: CISPO, MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5; there el >= 1, so that only the upper bound acts.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        proximal_logprobs: log pi [nats] of the policy that r is measured against; constant.
        advantages: A; constant.
        train_mask: True on trained tokens.
        eps_low: lower clamp of r is ``1 - eps_low``; 1 or more turns it off.
        eps_high: upper clamp of r is ``1 + eps_high``.
        token_weights: 1 for a token mean (the default), 1/|y| for a mean per trajectory.

    Raises:
        ConfigError: the bounds exclude 1.
    """
    check_clip(eps_low, eps_high)
    ratio = constant_ratio(policy_logprobs, proximal_logprobs, train_mask)
    weights = ratio.clamp(min=1.0 - eps_low, max=1.0 + eps_high)
    is_clamped = (ratio < 1.0 - eps_low) | (ratio > 1.0 + eps_high)
    logprobs = policy_logprobs.masked_fill(~train_mask, 0.0)
    objective = weights * advantages.masked_fill(~train_mask, 0.0) * logprobs
    return summed_loss(objective, train_mask, is_clamped, token_weights)


def gspo_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    proximal_logprobs: Float[Tensor, " tokens"],
    sequence_advantages: Float[Tensor, " sequences"],
    sequence_ids: Int[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    eps_low: float,
    eps_high: float,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_i W_i min(s_i A_i, clip(s_i, 1-el, 1+eh) A_i)`` with ``s_i = exp(mean_t log r_t)``.

    ``W_i`` is the sum of the token weights of the sequence: 1 with 1/|y|, as in the paper, where each token then gets
    the gradient ``s_i A_i / |y_i|``. A sequence is clipped whole; ``num_rejected`` counts its tokens.

    Source: GSPO (arXiv:2507.18071).

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        proximal_logprobs: log pi [nats] of the policy that r is measured against; constant.
        sequence_advantages: A of each sequence; constant.
        sequence_ids: which sequence each token belongs to; all of its tokens must be here.
        train_mask: True on trained tokens.
        eps_low: lower clip of s is ``1 - eps_low``; 3e-4 in the paper.
        eps_high: upper clip of s is ``1 + eps_high``; 4e-4 in the paper.
        token_weights: 1/|y| for a mean over sequences; 1 (the default) weighs a sequence by its length.

    Raises:
        ConfigError: the bounds exclude 1.
    """
    log_ratio = policy_logprobs - proximal_logprobs.detach()
    mean = sequence_means(
        log_ratio, sequence_ids, train_mask, num_sequences=len(sequence_advantages)
    )
    objective, is_flat = clipped_objective(
        mean, sequence_advantages.to(mean.dtype), eps_low=eps_low, eps_high=eps_high
    )
    per_token = objective.to(policy_logprobs.dtype)[sequence_ids]
    return summed_loss(per_token, train_mask, is_flat[sequence_ids], token_weights)
