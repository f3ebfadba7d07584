"""What an indexer learns whose selection several layers use (IndexShare)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def shared_index_loss(
    attention: Float[Tensor, "layers queries keys"],
    scores: Float[Tensor, "queries keys"],
    is_hidden: Bool[Tensor, "queries keys"],
) -> Float[Tensor, ""]:
    """Sum over the queries ``(1/layers) sum_j KL(p^(j) || q)``, with ``q = softmax(scores)``.

    Its gradient is that of ``KL(mean_j p^(j) || q)``, namely ``q - mean_j p^(j)`` with respect to the
    scores: the indexer aims at what its layers need on average. With one layer it is DSA's loss. A query
    without attention, or without a key that it may see, adds nothing.

    Source: IndexCache (arXiv:2603.12201), section 3.2; GLM-5.2's IndexShare.

    Args:
        attention: attention of the indexer's own layer and of those that take its selection, summed over
            heads; 0 where hidden; constant.
        scores: of the indexer, over all keys or over the selected ones; carries gradient.
        is_hidden: True where a query may not look: a later key, or an empty place of a selection.
    """
    attention = attention.detach()
    target = attention / attention.sum(dim=-1, keepdim=True).clamp_min(
        torch.finfo(attention.dtype).tiny
    )
    # Finite, because the softmax of nothing but -inf is NaN, in backward too; and hidden again before the
    # product, because 0 * -inf is NaN.
    log_q = scores.masked_fill(is_hidden, torch.finfo(scores.dtype).min).log_softmax(dim=-1)
    log_q = log_q.masked_fill(is_hidden, 0.0)
    return (torch.xlogy(target, target).mean(dim=0) - target.mean(dim=0) * log_q).sum()
