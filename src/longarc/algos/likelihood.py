"""Losses of plain likelihood, which policy and preference losses are mixed with."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longarc.algos.clipping import summed_loss
from longarc.algos.token_loss import TokenLoss


def positive_example_loss(
    policy_logprobs: Float[Tensor, " tokens"],
    is_correct: Bool[Tensor, " tokens"],
    train_mask: Bool[Tensor, " tokens"],
    *,
    token_weights: Float[Tensor, " tokens"] | None = None,
) -> TokenLoss:
    """Return ``-sum_t w_t log pi(a_t)`` over the tokens of correct samples, to be added to a policy loss.

    The normaliser counts these tokens alone, so that each of the two is divided by its own.

    Source: VAPO (arXiv:2504.05118), with a weight of 0.1.

    Args:
        policy_logprobs: log pi [nats] under the weights being trained; carries gradient.
        is_correct: True on the tokens of samples that were rewarded.
        train_mask: True on trained tokens.
        token_weights: 1 for a token mean (the default).
    """
    is_learned = train_mask & is_correct
    logprobs = policy_logprobs.masked_fill(~is_learned, 0.0)
    return summed_loss(logprobs, is_learned, torch.zeros_like(is_learned), token_weights)
