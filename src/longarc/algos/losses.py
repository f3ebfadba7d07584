"""The built-in policy losses as a recipe names them, each with the defaults of its paper.

``"longarc.algos.losses:icepop"`` in a recipe is this file's ``icepop``; a user's own loss is named
the same way and has the same shape.

A batch gets exactly one update, so the ratio against the start of the step is 1 in its value. Losses whose point is
another ratio therefore take it against the policy that sampled the token, which is what ``pi_old`` is in their papers.
"""

import math

import torch

from longarc.algos.corrected_loss import (
    sequence_masked_loss,
    truncated_loss,
    weighted_clip_loss,
)
from longarc.algos.importance import Level, masked_weights
from longarc.algos.policy_loss import (
    cispo_loss,
    double_sided_loss,
    gspo_loss,
    icepop_loss,
    ppo_clip_loss,
)
from longarc.algos.protocols import LossInputs
from longarc.algos.sequences import num_sequences, sequence_means
from longarc.algos.token_loss import TokenLoss
from longarc.errors import ConfigError

_NO_CLIP = math.inf
"""For losses that correct against the policy that sampled, and have no ratio left to clip."""


def icepop(
    inputs: LossInputs,
    *,
    low: float = 0.5,
    high: float = 2.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> TokenLoss:
    """GRPO with IcePop, GLM-5's reasoning RL; see :func:`~longarc.algos.policy_loss.icepop_loss`."""
    return icepop_loss(
        inputs.policy_logprobs,
        inputs.proximal_logprobs,
        inputs.behaviour_logprobs,
        inputs.advantages,
        inputs.train_mask,
        low=low,
        high=high,
        eps_low=eps_low,
        eps_high=eps_high,
        token_weights=inputs.token_weights,
    )


def double_sided(inputs: LossInputs, *, low: float = 0.2, high: float = 4.0) -> TokenLoss:
    """Double-sided importance sampling, GLM-5's agentic RL, with SAO's bounds for code.

    See :func:`~longarc.algos.policy_loss.double_sided_loss`; SAO's bounds for math are 0.7 and 6.
    """
    return double_sided_loss(
        inputs.policy_logprobs,
        inputs.behaviour_logprobs,
        inputs.advantages,
        inputs.train_mask,
        low=low,
        high=high,
        token_weights=inputs.token_weights,
    )


def ppo_clip(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clip against the start-of-step policy; :func:`~longarc.algos.policy_loss.ppo_clip_loss`."""
    return ppo_clip_loss(
        inputs.policy_logprobs,
        inputs.proximal_logprobs,
        inputs.advantages,
        inputs.train_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
        token_weights=inputs.token_weights,
    )


def behaviour_ppo(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO's clip against the policy that sampled; :func:`~longarc.algos.policy_loss.ppo_clip_loss`."""
    return ppo_clip_loss(
        inputs.policy_logprobs,
        inputs.behaviour_logprobs,
        inputs.advantages,
        inputs.train_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
        token_weights=inputs.token_weights,
    )


def cispo(inputs: LossInputs, *, eps_low: float = 1.0, eps_high: float = 2.0) -> TokenLoss:
    """CISPO of MiniMax-M1, the lower bound off; :func:`~longarc.algos.policy_loss.cispo_loss`."""
    return cispo_loss(
        inputs.policy_logprobs,
        inputs.behaviour_logprobs,
        inputs.advantages,
        inputs.train_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        token_weights=inputs.token_weights,
    )


def gspo(inputs: LossInputs, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> TokenLoss:
    """GSPO, ratio and clip of whole segments; :func:`~longarc.algos.policy_loss.gspo_loss`.

    Raises:
        ConfigError: advantages differ within a segment, as those of a teacher do.
    """
    return gspo_loss(
        inputs.policy_logprobs,
        inputs.behaviour_logprobs,
        _sequence_advantages(inputs),
        inputs.sequence_ids,
        inputs.train_mask,
        eps_low=eps_low,
        eps_high=eps_high,
        token_weights=inputs.token_weights,
    )


def opsm(
    inputs: LossInputs, *, delta: float = 1e-4, eps_low: float = 0.2, eps_high: float = 0.28
) -> TokenLoss:
    """Off-policy sequence masking of DeepSeek-V3.2; :func:`~longarc.algos.corrected_loss.sequence_masked_loss`."""
    return sequence_masked_loss(
        inputs.policy_logprobs,
        inputs.behaviour_logprobs,
        inputs.advantages,
        inputs.sequence_ids,
        inputs.train_mask,
        delta=delta,
        eps_low=eps_low,
        eps_high=eps_high,
        token_weights=inputs.token_weights,
    )


def truncated(inputs: LossInputs, *, cap: float = 2.0) -> TokenLoss:
    """REINFORCE with truncated importance sampling; :func:`~longarc.algos.corrected_loss.truncated_loss`."""
    return truncated_loss(
        inputs.policy_logprobs,
        inputs.policy_logprobs.detach(),
        inputs.behaviour_logprobs,
        inputs.advantages,
        inputs.train_mask,
        cap=cap,
        eps_low=_NO_CLIP,
        eps_high=_NO_CLIP,
        token_weights=inputs.token_weights,
    )


def masked(
    inputs: LossInputs, *, low: float = 0.5, high: float = 2.0, veto: float = 1e-4
) -> TokenLoss:
    """REINFORCE with importance sampling masked token by token (MIS).

    See :func:`~longarc.algos.importance.masked_weights`.
    """
    return _masked(inputs, "token", low=low, high=high, veto=veto)


def masked_by_sequence(
    inputs: LossInputs, *, low: float = 0.5, high: float = 2.0, veto: float = 1e-4
) -> TokenLoss:
    """The same, with segments kept or dropped by the product of their ratios."""
    return _masked(inputs, "sequence", low=low, high=high, veto=veto)


def masked_by_geometric_mean(
    inputs: LossInputs, *, low: float = 0.996, high: float = 1.001, veto: float = 1e-4
) -> TokenLoss:
    """The same, with segments kept or dropped by the geometric mean of their ratios; StepFun's bounds."""
    return _masked(inputs, "geometric", low=low, high=high, veto=veto)


def _masked(inputs: LossInputs, level: Level, *, low: float, high: float, veto: float) -> TokenLoss:
    policy = inputs.policy_logprobs.detach()
    weights = masked_weights(
        policy - inputs.behaviour_logprobs,
        inputs.train_mask,
        inputs.sequence_ids,
        low=low,
        high=high,
        level=level,
        veto=veto,
    )
    return weighted_clip_loss(
        inputs.policy_logprobs,
        policy,
        weights,
        inputs.advantages,
        inputs.train_mask,
        eps_low=_NO_CLIP,
        eps_high=_NO_CLIP,
        token_weights=inputs.token_weights,
    )


def _sequence_advantages(inputs: LossInputs) -> torch.Tensor:
    """Return the one advantage of each segment."""
    ids, mask = inputs.sequence_ids, inputs.train_mask
    means = sequence_means(inputs.advantages, ids, mask, num_sequences=num_sequences(ids))
    gap = (inputs.advantages - means[ids]).masked_fill(~mask, 0.0).abs()
    if len(gap) and not gap.max() <= 1e-6 * (1.0 + means.abs().max()):
        raise ConfigError(
            "gspo compares whole segments and needs one advantage for all tokens of a segment, but they differ by up "
            f"to {gap.max().item():.3g}, as a teacher's do; use icepop, double_sided or cispo"
        )
    return means
