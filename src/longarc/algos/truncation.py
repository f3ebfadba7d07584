"""Top-k, top-p and min-p: which tokens are left to draw from, and their log-probabilities.

Engine and trainer share the last step. A trainer that scored a sampled token over the whole vocabulary would
compare two different distributions, so the engine records what it left and the trainer scores among the same ids.

Sources: top-k, Fan et al., arXiv:1805.04833; top-p, Holtzman et al., arXiv:1904.09751; min-p, Nguyen et al.,
arXiv:2407.01082. Shape letters: B rows, V vocabulary, K kept tokens.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_FEW = 1024
"""Likeliest tokens in which top-p is looked for first; a whole vocabulary is sorted only where they are not enough."""


def kept_tokens(
    logits_BV: Float[Tensor, "B V"], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Bool[Tensor, "B V"]:
    """Say which tokens are left to draw from; at least the likeliest.

    Args:
        logits_BV: after division by the temperature.
        top_k: so many of the likeliest; 0 keeps all.
        top_p: of these, the likeliest until they reach this share; 1 keeps all.
        min_p: of these, those with at least this share of the likeliest one's probability; 0 keeps all.

    A token tied with the last one kept is kept too, so that the result does not depend on an order of ties.
    """
    is_kept_BV = torch.ones_like(logits_BV, dtype=torch.bool)
    vocab_size = logits_BV.shape[1]
    if 0 < top_k < vocab_size:
        is_kept_BV = logits_BV >= logits_BV.topk(top_k).values[:, -1:]
    if top_p < 1:
        probability_BV = logits_BV.masked_fill(~is_kept_BV, -math.inf).softmax(dim=-1)
        is_kept_BV = probability_BV >= _least_probability(probability_BV, top_p)
    if min_p > 0:
        is_kept_BV &= logits_BV >= logits_BV.amax(dim=-1, keepdim=True) + math.log(min_p)
    return is_kept_BV


def _least_probability(probability_BV: Tensor, top_p: float) -> Tensor:
    """Return the probability of the token that reaches the share, [B, 1]."""
    for count in (_FEW, probability_BV.shape[1]):
        if count > probability_BV.shape[1]:
            continue
        ordered = probability_BV.topk(count).values
        # A token is needed while those before it have not reached the share; the first always is.
        num_needed = (ordered.cumsum(-1) - ordered < top_p).sum(-1, keepdim=True).clamp_min(1)
        if bool((num_needed < count).all()):
            break
    return ordered.gather(1, num_needed - 1)


def kept_logprobs(
    logits_BK: Float[Tensor, "B K"], is_kept_BK: Bool[Tensor, "B K"]
) -> Float[Tensor, "B K"]:
    """Return log-probabilities [nats] among the kept tokens, -inf elsewhere; fp64, carries gradient.

    The sum runs token by token from the left, in fp64. So columns that are not kept, wherever they stand and
    however many there are, change no bit.

    Args:
        logits_BK: after division by the temperature.
        is_kept_BK: at least one in each row.
    """
    wide_BK = logits_BK.double().masked_fill(~is_kept_BK, -math.inf)
    highest_B1 = wide_BK.detach().amax(dim=-1, keepdim=True)
    total_B1 = (wide_BK - highest_B1).exp().cumsum(dim=-1)[:, -1:]
    return wide_BK - (highest_B1 + total_B1.log())
