"""KL-constrained actor-critic, which learns off-policy from a critic and from what it did before.

Maximising ``E[A] - beta KL(pi || pi_ref)`` has the solution ``pi* = pi_ref exp(A / beta) / Z``. The actor is regressed on
it: no importance ratio stands in the loss, so trajectories of any policy may be replayed.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.checks import check_frac, check_positive
from longarc.algos.sequences import sequence_sums
from longarc.algos.token_loss import TokenLoss
from longarc.errors import ContractError


def step_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float = 0.9,
    lam: float = 0.5,
) -> Float[Tensor, " actions"]:
    """Return ``lam (r_t + gamma V_{t+1} - V_t) + (1 - lam) (G_t - V_t)`` for each action, in float64.

    A mixture of the estimate by the next step, which leans on the critic, and by the end of the trajectory,
    ``G_t = sum_k gamma^k r_{t+k}``, which does not. Behind the last action V is 0.

    Source: WebRL (arXiv:2411.02337), gamma 0.9 and lambda 0.5. Its text writes the last reward in place
    of G_t, its code discounts the return.

    Args:
        rewards: r of each action; usually 0 but for the last.
        values: V of the state before each action.
        gamma: discount per action.
        lam: 1 looks one step ahead only, 0 at the outcome only. Not the lambda of GAE.

    Raises:
        ConfigError: gamma or lam is not in [0, 1].
        ContractError: rewards and values differ in length.
    """
    check_frac("gamma", gamma)
    check_frac("lam", lam)
    if len(rewards) != len(values):
        raise ContractError(
            f"one value for each reward is needed, but there are {len(rewards)} rewards and {len(values)} values"
        )
    advantages = []
    following, next_value = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * following
        by_step = reward + gamma * next_value - value
        advantages.append(lam * by_step + (1.0 - lam) * (following - value))
        next_value = value
    return torch.tensor(advantages[::-1], dtype=torch.float64)


def kl_constrained_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"],
    action_advantages: Float[Tensor, " actions"],
    action_ids: Int[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    beta: float,
) -> TokenLoss:
    """Return ``sum_a (beta log pi(a)/pi_ref(a) - A_a)^2`` over actions; the normaliser is actions.

    An action is what the policy says in one turn, and ``log pi(a)`` the sum over its tokens. ``num_rejected`` is 0.

    Source: WebRL (arXiv:2411.02337): the squared distance to the optimum above.

    Args:
        policy_logprobs: log pi [nats] of each token, under the weights being trained; carries gradient.
        reference_logprobs: log pi_ref [nats] of each token, of the policy of the phase before; constant.
        action_advantages: A of each action, see :func:`step_advantages`; constant.
        action_ids: which action each token belongs to; all of its tokens must be here.
        train_mask: True on trained tokens.
        beta: strength of the constraint.

    Raises:
        ConfigError: beta is not above 0.
    """
    check_positive("beta", beta)
    log_ratio = policy_logprobs - reference_logprobs.detach()
    sums, counts = sequence_sums(
        log_ratio, action_ids, train_mask, num_sequences=len(action_advantages)
    )
    is_trained = counts > 0
    target = action_advantages.detach().double().masked_fill(~is_trained, 0.0)
    error = (beta * sums - target).square()
    dtype = policy_logprobs.dtype
    return TokenLoss(
        loss_sum=error.sum().to(dtype),
        normaliser=is_trained.sum().to(dtype),
        num_rejected=torch.zeros((), dtype=dtype, device=policy_logprobs.device),
    )
