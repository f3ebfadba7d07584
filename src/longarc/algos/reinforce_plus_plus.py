"""REINFORCE++: returns per token, and one normalisation over the whole batch in place of groups."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longarc.algos.gae import skip_observation_gae


def carried_returns(
    rewards: Sequence[float] | Float[Tensor, " tokens"],
    action_mask: Sequence[bool] | Bool[Tensor, " tokens"],
    *,
    gamma: float,
) -> Float[Tensor, " tokens"]:
    """Return ``G_t = r_t + gamma G_{t+1}`` over sampled tokens, carried across observations.

    A recursion that starts anew wherever a token is masked loses the reward of all turns but the
    last. Observations get zeros and are not discounted.

    Source: REINFORCE++ (arXiv:2501.03262), section 3; the carrying over is LongArc's reading for
    several turns.

    Args:
        rewards: r_t of each token: the outcome on the last sampled one, and -beta KL on each if that
            is wanted; none on an observation.
        action_mask: True where the policy sampled the token.
        gamma: discount per sampled token; 1 in the paper.

    Raises:
        ConfigError: gamma is not in [0, 1].
        ContractError: lengths differ, or a reward sits on an observation.
    """
    values = [0.0] * len(rewards)
    returns, _ = skip_observation_gae(rewards, values, action_mask, gamma=gamma, lam=1.0)
    return returns


def batch_normalised(
    values: Float[Tensor, " entries"], weights: Float[Tensor, " entries"], *, eps: float = 1e-6
) -> Float[Tensor, " entries"]:
    """Return ``(x - mean) / (std + eps)`` with weighted statistics over the whole batch, in float64.

    ``mean = sum w x / sum w`` and ``std^2 = sum w (x - mean)^2 / sum w``. Entries of weight 0 (observations,
    padding) have no influence, may hold anything, and get 0. A deviation of at most ``eps`` gives zeros.

    Source: REINFORCE++ (arXiv:2501.03262), section 3: the mean and deviation of all trained tokens of the global
    batch. REINFORCE++-baseline subtracts the group's mean before.

    Args:
        values: of all tokens of the step; or one for each trajectory, if it has the same for all its tokens.
        weights: 1 for each trained token; or the number of them in each trajectory.
        eps: added to the deviation, and the threshold below which it counts as zero.
    """
    is_used = weights > 0
    w = weights.double().masked_fill(~is_used, 0.0)
    x = values.double().masked_fill(~is_used, 0.0)
    total = w.sum()
    if not total > 0:
        return torch.zeros_like(x)
    centred = (x - (w * x).sum() / total).masked_fill(~is_used, 0.0)
    std = ((w * centred.square()).sum() / total).sqrt()
    if std <= eps:
        return torch.zeros_like(x)
    return centred / (std + eps)
