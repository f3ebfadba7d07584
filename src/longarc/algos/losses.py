"""The built-in policy losses as a recipe names them, each with the defaults of its paper.

``"longarc.algos.losses:icepop"`` in a recipe is this file's ``icepop``; a user's own loss is named
the same way and has the same shape.
"""

from longarc.algos.policy_loss import double_sided_loss, icepop_loss, ppo_clip_loss
from longarc.algos.protocols import LossInputs
from longarc.algos.token_loss import TokenLoss


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
