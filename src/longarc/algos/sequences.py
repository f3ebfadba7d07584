"""Statistics of whole sequences in a flat row of tokens.

A sequence is what its ids say: the tokens of one segment. Segments never straddle micro-batches, so no statistic
depends on how a step was split.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def sequence_sums(
    values: Float[Tensor, " tokens"],
    sequence_ids: Int[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    num_sequences: int,
) -> tuple[Float[Tensor, " sequences"], Float[Tensor, " sequences"]]:
    """Return of each sequence the sum over its trained tokens and their number, in float64.

    Carries gradient. Values of other tokens may be anything.
    """
    masked = values.double().masked_fill(~train_mask, 0.0)
    zeros = masked.new_zeros(num_sequences)
    sums = zeros.index_add(0, sequence_ids, masked)
    return sums, zeros.index_add(0, sequence_ids, train_mask.double())


def sequence_means(
    values: Float[Tensor, " tokens"],
    sequence_ids: Int[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    num_sequences: int,
) -> Float[Tensor, " sequences"]:
    """Return of each sequence the mean over its trained tokens, 0 without any, in float64."""
    sums, counts = sequence_sums(values, sequence_ids, train_mask, num_sequences=num_sequences)
    return sums / counts.clamp_min(1.0)


def num_sequences(sequence_ids: Int[Tensor, " tokens"]) -> int:
    """Return one more than the largest id, 0 without tokens."""
    return int(sequence_ids.max()) + 1 if len(sequence_ids) else 0


def smallest(
    values: Float[Tensor, " tokens"],
    sequence_ids: Int[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    num_sequences: int,
) -> Float[Tensor, " sequences"]:
    """Return of each sequence the smallest value of a trained token, inf without any."""
    masked = values.masked_fill(~train_mask, torch.inf)
    start = masked.new_full((num_sequences,), torch.inf)
    return start.scatter_reduce(0, sequence_ids, masked, "amin")
