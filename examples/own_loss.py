"""A policy loss of your own: the importance ratio is capped, and no token loses its gradient.

Source: CISPO, MiniMax-M1 (arXiv:2506.13585), eq. 4; the ratio is a constant.
"""

from longarc.algos.protocols import LossInputs
from longarc.algos.token_loss import TokenLoss


def capped(inputs: LossInputs, *, cap: float = 2.0) -> TokenLoss:
    mask = ~inputs.train_mask  # masked before anything is multiplied: 0 * inf is NaN
    policy = inputs.policy_logprobs.masked_fill(mask, 0.0)
    behaviour = inputs.behaviour_logprobs.masked_fill(mask, 0.0)
    ratio = (policy - behaviour).detach().exp().clamp(max=cap)
    weights = inputs.token_weights.masked_fill(mask, 0.0)
    advantages = inputs.advantages.masked_fill(mask, 0.0)
    return TokenLoss(
        loss_sum=-(weights * ratio * advantages * policy).sum(),
        normaliser=weights.sum(),
        num_rejected=ratio.new_zeros(()),
    )
