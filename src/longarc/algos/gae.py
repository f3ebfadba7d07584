"""Generalised advantage estimation, for trajectories that are interrupted by observations and by compaction.

``V_t`` is the value of the state before token t is sampled, everything observed so far included. All recursions run in
float64 and in Python: a rollout is a few thousand tokens, and nothing here carries a gradient.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longarc.algos.checks import check_frac, check_positive
from longarc.errors import ConfigError, ContractError


def token_gae(
    rewards: Sequence[float] | Float[Tensor, " tokens"],
    values: Sequence[float] | Float[Tensor, " tokens"],
    *,
    gamma: float,
    lam: float,
    bootstrap_value: float = 0.0,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return advantages ``A_t = delta_t + gamma lam A_{t+1}`` and returns ``A_t + V_t``.

    ``delta_t = r_t + gamma V_{t+1} - V_t``; behind the last token stands ``bootstrap_value``.

    Source: Schulman et al. (arXiv:1506.02438), eq. 16.

    Args:
        rewards: r_t of each token.
        values: V_t of each token.
        gamma: discount per token; 1 in VAPO, SAO and CompactionRL, 0.9 in WebRL.
        lam: 1 is the Monte-Carlo return, 0 is one step of temporal difference.
        bootstrap_value: V behind the last token: 0 where the trajectory ended by itself, the critic's value where a
            time or token limit cut it off.

    Raises:
        ConfigError: gamma or lam is not in [0, 1].
        ContractError: rewards and values differ in length.
    """
    check_frac("gamma", gamma)
    check_frac("lam", lam)
    r, v = _floats(rewards), _floats(values)
    _check_aligned(rewards=r, values=v)
    advantages = [0.0] * len(v)
    following, next_value = 0.0, bootstrap_value
    for t in reversed(range(len(v))):
        delta = r[t] + gamma * next_value - v[t]
        following = delta + gamma * lam * following
        next_value = v[t]
        advantages[t] = following
    result = torch.tensor(advantages, dtype=torch.float64)
    return result, result + torch.tensor(v, dtype=torch.float64)


def skip_observation_gae(
    rewards: Sequence[float] | Float[Tensor, " tokens"],
    values: Sequence[float] | Float[Tensor, " tokens"],
    action_mask: Sequence[bool] | Bool[Tensor, " tokens"],
    *,
    gamma: float,
    lam: float,
    bootstrap_value: float = 0.0,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return token GAE over the sampled tokens alone, ``A(a_{i,N}) = delta + gamma lam A(a_{i+1,0})``.

    Observations are stepped over: they are neither discounted nor is their value read, and they get zeros. The value of
    the first token behind an observation has seen it.

    Source: SAO (arXiv:2607.07508), eq. 4 and 5.

    Args:
        rewards: r_t of each token. A reward on an observation is an error: the reward at the end of a trajectory
            belongs to its last sampled token.
        values: V_t of each token; those of observations may be anything.
        action_mask: True where the policy sampled the token.
        gamma: discount per sampled token.
        lam: see :func:`token_gae`.
        bootstrap_value: V behind the last sampled token; see :func:`token_gae`.

    Raises:
        ConfigError: gamma or lam is not in [0, 1].
        ContractError: lengths differ, or a reward sits on an observation.
    """
    r, v = _floats(rewards), _floats(values)
    flags = action_mask.tolist() if isinstance(action_mask, Tensor) else action_mask
    is_action = [bool(flag) for flag in flags]
    _check_aligned(rewards=r, values=v, action_mask=is_action)
    lost = [t for t, flag in enumerate(is_action) if not flag and r[t] != 0]
    if lost:
        raise ContractError(
            f"the reward {r[lost[0]]} of token {lost[0]} sits on an observation, which gets no advantage; give it to "
            f"the last sampled token before it"
        )
    actions = [t for t, flag in enumerate(is_action) if flag]
    own = token_gae(
        [r[t] for t in actions],
        [v[t] for t in actions],
        gamma=gamma,
        lam=lam,
        bootstrap_value=bootstrap_value,
    )
    advantages, returns = torch.zeros(2, len(v), dtype=torch.float64)
    advantages[actions], returns[actions] = own
    return advantages, returns


def length_adaptive_lambda(num_action_tokens: int, *, alpha: float) -> float:
    """Return ``clip(1 - 1 / (alpha l), 0, 1)``: the longer the response, the nearer to Monte Carlo.

    With gamma = 1 the weights ``lam^k`` then add up to ``alpha l``. The critic itself learns with lambda = 1.

    Source: VAPO (arXiv:2504.05118) with alpha = 0.05; SAO (arXiv:2607.07508) and CompactionRL (arXiv:2607.05378) with
    alpha = 1.5.

    Args:
        num_action_tokens: l, the trained tokens of the response [tokens]; of the whole rollout where it was compacted.
        alpha: above 0.

    Raises:
        ConfigError: alpha is not above 0.
        ContractError: there is no token.
    """
    check_positive("alpha", alpha)
    if num_action_tokens < 1:
        raise ContractError(
            f"num_action_tokens={num_action_tokens}: a response without sampled tokens has no lambda; leave it out"
        )
    return max(0.0, 1.0 - 1.0 / (alpha * num_action_tokens))


def cross_trajectory_gae(
    segment_values: Sequence[Sequence[float] | Float[Tensor, " tokens"]],
    *,
    terminal_reward: float,
    gamma: float,
    alpha: float | None = None,
    lam: float | None = None,
    lambda_scope: Literal["rollout", "segment"] = "rollout",
    bootstrap_value: float = 0.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``A = (gamma lam)^{N_>s} A_loc`` and critic targets, for each segment of one compacted rollout.

    ``A_loc`` is token GAE inside the segment with the terminal reward on its last token and nothing behind it;
    ``N_>s`` counts the trained tokens of all later segments. A token is thus discounted as if the segments were one
    trajectory, exactly so where V = 0. The critic's target is the local return with lambda = 1, without the factor: the
    corrected one would pull V towards itself.

    Source: CompactionRL (arXiv:2607.05378), eq. 13 to 15. Which length decides lambda is not published; with
    ``"segment"`` short summaries lose nearly all credit (e^-2 instead of e^-1/2 for the first of four equal segments).
    The bootstrap of a rollout that was cut off is LongArc's: its outcome is ``R + gamma V`` for every segment.

    Args:
        segment_values: V_t of the trained tokens of each segment, in the order of time; observations are left out.
        terminal_reward: R of the whole rollout.
        gamma: discount per trained token.
        alpha: of :func:`length_adaptive_lambda`; give either this or lam.
        lam: one lambda for all segments; give either this or alpha.
        lambda_scope: whether l of alpha counts the tokens of the rollout or those of each segment.
        bootstrap_value: V behind the last segment; 0 unless a limit cut the rollout off.

    Raises:
        ConfigError: not exactly one of alpha and lam is given, or one of them or gamma is out of range.
        ContractError: a segment has no trained token.
    """
    check_frac("gamma", gamma)
    if (alpha is None) == (lam is None):
        raise ConfigError(
            f"alpha={alpha}, lam={lam}: give exactly one of them, alpha for a length-adaptive lambda or lam"
        )
    lengths = [len(values) for values in segment_values]
    if 0 in lengths:
        raise ContractError(f"segment {lengths.index(0)} has no trained token; leave it out")
    lambdas = _lambdas(lengths, alpha=alpha, lam=lam, scope=lambda_scope)
    outcome = terminal_reward + gamma * bootstrap_value
    advantages, targets = [], []
    for index, values in enumerate(segment_values):
        factor = (gamma * lambdas[index]) ** sum(lengths[index + 1 :])
        rewards = [0.0] * (lengths[index] - 1) + [outcome]
        local, _ = token_gae(rewards, values, gamma=gamma, lam=lambdas[index])
        _, target = token_gae(rewards, values, gamma=gamma, lam=1.0)
        advantages.append(factor * local)
        targets.append(target)
    return advantages, targets


def _lambdas(
    lengths: Sequence[int], *, alpha: float | None, lam: float | None, scope: str
) -> list[float]:
    if alpha is None:
        assert lam is not None
        return [lam] * len(lengths)
    if scope == "rollout":
        return [length_adaptive_lambda(sum(lengths), alpha=alpha)] * len(lengths)
    return [length_adaptive_lambda(length, alpha=alpha) for length in lengths]


def _floats(numbers: Sequence[float] | Tensor) -> list[float]:
    """Return plain numbers: a loop over the elements of a tensor is a hundred times slower."""
    if isinstance(numbers, Tensor):
        return [float(number) for number in numbers.tolist()]
    return [float(number) for number in numbers]


def _check_aligned(**columns: Sequence[object]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ContractError(f"one entry for each token is needed, but the lengths are {lengths}")
