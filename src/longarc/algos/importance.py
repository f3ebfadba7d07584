"""Importance weights that select: a ratio outside its band contributes zero, never ``inf * 0``.

Ratios are constants in every loss that uses these weights.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.checks import check_band, check_frac, check_not_negative, check_positive
from longarc.algos.sequences import num_sequences, sequence_means, sequence_sums, smallest


def icepop_weights(
    ratio: Float[Tensor, " tokens"], *, low: float, high: float
) -> Float[Tensor, " tokens"]:
    """Return ``rho if low <= rho <= high else 0`` (closed band).

    Source: GLM-5 (arXiv:2602.15763) eq. 1 with low = 1/beta, high = beta; Ring-1T uses [0.5, 5].

    Raises:
        ConfigError: the band excludes 1.
    """
    check_band(low, high, is_closed=True)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def double_sided_weights(
    ratio: Float[Tensor, " tokens"], *, low: float, high: float
) -> Float[Tensor, " tokens"]:
    """Return ``r if low < r < high else 0`` (open band).

    Source: GLM-5 (arXiv:2602.15763) eq. 5. The bounds are bounds and not epsilons: ``1 - 0.8`` is
    0.19999999999999996 in float64 and would let 0.2 through.

    Raises:
        ConfigError: the band excludes 1.
    """
    check_band(low, high, is_closed=False)
    return torch.where((ratio > low) & (ratio < high), ratio, 0.0)


def truncated_weights(ratio: Float[Tensor, " tokens"], *, cap: float) -> Float[Tensor, " tokens"]:
    """Return ``min(rho, cap)``: biased, bounded variance.

    Source: truncated importance sampling (TIS), Ionides (2008); 2 is the usual cap between engine
    and trainer.

    Raises:
        ConfigError: the cap is not above 0.
    """
    check_positive("cap", cap)
    return ratio.clamp(max=cap)


Level = Literal["token", "sequence", "geometric"]
"""What a mask of :func:`masked_weights` looks at: each ratio, their product, or their geometric mean."""


def masked_weights(
    log_ratio: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    sequence_ids: Int[Tensor, " tokens"],
    *,
    low: float,
    high: float,
    level: Level = "token",
    veto: float = 0.0,
) -> Float[Tensor, " tokens"]:
    """Return ``rho_t 1[low <= q <= high] 1[min_t rho_t >= veto]``, 0 on tokens that are not trained.

    ``q`` is rho_t itself, the product of all ratios of the sequence, or their geometric mean
    ``exp(mean log rho)``. The product leaves any band as sequences grow; the geometric mean does not
    depend on their length, and its bounds lie close to 1. A token below the veto drops its whole
    sequence, at every level. Dropped tokens stay in the normaliser of a loss.

    Source: masked importance sampling (MIS); token 0.5 to 2, geometric 0.9999 to 1.0001 and a veto of
    1e-4 in slime's example of training and inference that disagree; geometric 0.996 to 1.001 in
    StepFun's MIS-PO.

    Args:
        log_ratio: log rho [nats] of each token, trainer over engine; those not trained may be anything.
        train_mask: True on trained tokens.
        sequence_ids: which sequence each token belongs to; all of its tokens must be here.
        low: lower bound of q, closed.
        high: upper bound of q, closed.
        level: what q is.
        veto: smallest ratio that a token may have; 0 vetoes nothing.

    Raises:
        ConfigError: the band excludes 1, or the veto is not in [0, 1].
    """
    check_band(low, high, is_closed=True)
    check_frac("veto", veto)
    log_ratio = log_ratio.masked_fill(~train_mask, 0.0)
    ratio = log_ratio.exp()
    count = num_sequences(sequence_ids)
    if level == "token":
        statistic = ratio
    elif level == "sequence":
        sums, _ = sequence_sums(log_ratio, sequence_ids, train_mask, num_sequences=count)
        statistic = sums.exp()[sequence_ids]
    else:
        means = sequence_means(log_ratio, sequence_ids, train_mask, num_sequences=count)
        statistic = means.exp()[sequence_ids]
    is_kept = train_mask & (statistic >= low) & (statistic <= high)
    is_kept &= (smallest(ratio, sequence_ids, train_mask, num_sequences=count) >= veto)[
        sequence_ids
    ]
    return torch.where(is_kept, ratio, 0.0)


def keeps_sequence(
    log_ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    sequence_ids: Int[Tensor, " tokens"],
    *,
    delta: float,
) -> Bool[Tensor, " tokens"]:
    """Say which tokens stay: ``not (A_t < 0 and mean_t log(mu / pi) > delta)``.

    Off-policy sequence masking: what went wrong under another policy teaches little, and pushing an
    unlikely sequence further down is what makes training unstable. Sequences with a good outcome stay
    however far away they are.

    Source: OPSM, DeepSeek-V3.2 (arXiv:2512.02556), section 3.1.

    Args:
        log_ratio: log(pi / mu) [nats] of each token; those not trained may be anything.
        advantages: A of each token.
        train_mask: True on trained tokens.
        sequence_ids: which sequence each token belongs to; all of its tokens must be here.
        delta: threshold of the mean divergence [nats per token], 0 or more; 1e-4 in slime.

    Raises:
        ConfigError: delta is below 0.
    """
    check_not_negative("delta", delta)
    count = num_sequences(sequence_ids)
    divergence = -sequence_means(log_ratio, sequence_ids, train_mask, num_sequences=count)
    is_far = (divergence > delta)[sequence_ids]
    return ~(is_far & (advantages < 0))
