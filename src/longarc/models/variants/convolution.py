"""A short causal convolution over sequences that share one packed axis, and over cached ones.

Shape letters: N tokens, c channels, J taps, B rows from before the pass.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.models.plan import QueryRun
from longarc.models.variants.memory import CachedSequence


def causal_convolution(
    x_Nc: Float[Tensor, "N c"],
    weight_cJ: Float[Tensor, "c J"],
    rows_NJ: Int[Tensor, "N J"],
    before_Bc: Float[Tensor, "B c"] | None = None,
) -> Float[Tensor, "N c"]:
    """Return ``sum_j weight[:, j] x[rows[:, j]]``, channel by channel.

    Args:
        x_Nc: the tokens of the pass.
        weight_cJ: the last tap is for the token itself.
        rows_NJ: what each tap reads: a token, N + b for row b of ``before_Bc``, or -1 for nothing.
        before_Bc: tokens that a cache remembers.
    """
    source = x_Nc if before_Bc is None else torch.cat([x_Nc, before_Bc])
    padded = torch.cat([source, source.new_zeros((1, source.shape[1]))])
    output = x_Nc.new_zeros(())
    for tap in range(weight_cJ.shape[1]):
        output = output + padded[rows_NJ[:, tap]] * weight_cJ[:, tap]
    return output


def packed_taps(runs: Sequence[QueryRun], *, num_tokens: int, num_taps: int) -> Int[Tensor, "N J"]:
    """Say which tokens each token's convolution reads where all are in one pass."""
    rows_NJ = torch.full((num_tokens, num_taps), -1)
    back_J = torch.arange(num_taps - 1, -1, -1)
    for run in runs:
        rows_P = run.key_row_list().cpu()
        positions_QJ = torch.arange(run.first_position, run.num_keys)[:, None] - back_J
        found_QJ = rows_P[positions_QJ.clamp_min(0)]
        rows_NJ[run.queries] = found_QJ.masked_fill(positions_QJ < 0, -1)
    return rows_NJ


def cached_taps(
    sequences: Sequence[CachedSequence], *, num_tokens: int, num_taps: int
) -> tuple[Int[Tensor, "N J"], Int[Tensor, "B before"]]:
    """Say what is read where a cache remembers ``num_taps - 1`` tokens before each sequence's new ones.

    Returns:
        the rows as :func:`causal_convolution` takes them; and for each sequence those that the cache has to
        remember next.
    """
    rows_NJ = torch.full((num_tokens, num_taps), -1)
    num_before = num_taps - 1
    next_before = torch.empty((len(sequences), num_before), dtype=torch.long)
    for index, sequence in enumerate(sequences):
        remembered = torch.arange(num_before) + num_tokens + index * num_before
        new = torch.arange(sequence.num_queries) + sequence.first_query
        rows = torch.cat([remembered, new])
        rows_NJ[new] = rows.unfold(0, num_taps, 1)
        next_before[index] = rows[len(rows) - num_before :]
    return rows_NJ, next_before
