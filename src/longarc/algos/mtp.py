"""Losses of multi-token prediction (MTP): how many drafted tokens will the main model accept?

A draft token drawn from q is accepted with probability ``min(1, p / q)``, so on average with
``sum_v min(p, q)``: one minus the total variation distance (TV) of the main model's p and the draft's q.

Shape letters: G draft steps in their order; behind them the positions, on any number of axes.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor


def acceptance(
    target_probs: Float[Tensor, "*positions vocab"], draft_logits: Float[Tensor, "*positions vocab"]
) -> Float[Tensor, "*positions"]:
    """Return ``alpha = sum_v min(sg[p(v)], q(v)) = 1 - TV(p, q)`` with ``q = softmax(draft_logits)``.

    The gradient goes through q alone: ``d alpha / dz = q (m - sum_v m q)`` with ``m = [q <= p]``.

    Source: Bebop (arXiv:2606.12370), equations 10 and 11.

    Args:
        target_probs: what the main model gives the same token; constant.
        draft_logits: of the draft; carries gradient.
    """
    draft_probs = draft_logits.softmax(dim=-1)
    target_probs = target_probs.detach()
    return torch.where(draft_probs <= target_probs, draft_probs, target_probs).sum(dim=-1)


def end_to_end_tv_loss(
    target_probs: Float[Tensor, "G *positions vocab"],
    draft_logits: Float[Tensor, "G *positions vocab"],
) -> Float[Tensor, "*positions"]:
    """Return ``1 - (1/G) sum_j prod_{i<=j} alpha_i`` of each position; with one step, that is its TV.

    Holds all probabilities at once; ``longarc.models.mtp_losses`` does not.

    Source: Bebop (arXiv:2606.12370), equations 12 and 13; the end-to-end TV loss of GLM-5.2.
    """
    acceptances = acceptance(target_probs, draft_logits)
    return end_to_end_tv(acceptances, torch.ones_like(acceptances, dtype=torch.bool))


def chained(
    steps: Shaped[Tensor, "G targets"], *, fill: float | int
) -> Shaped[Tensor, "G targets"]:
    """Return for each target, as the first of a chain, what the steps give to it and to those behind it.

    ``result[g, m] = steps[g, m + g]``: step g of the chain that begins with target m predicts target m + g.

    Args:
        steps: one number for each step and the target that it predicts.
        fill: stands where the targets end.
    """
    num_targets = steps.shape[1]
    return torch.stack(
        [
            F.pad(row[step:], (0, min(step, num_targets)), value=fill)
            for step, row in enumerate(steps)
        ]
    )


def single_step_tv(
    acceptances: Float[Tensor, "G ..."], is_valid: Bool[Tensor, "G ..."]
) -> Float[Tensor, "G ..."]:
    """Return ``1 - alpha`` of each draft step by itself, 0 where it is not valid.

    The mean over the valid steps is the loss.

    Source: Bebop (arXiv:2606.12370), equation 10.
    """
    return (1.0 - acceptances).masked_fill(~is_valid, 0.0)


def end_to_end_tv(
    acceptances: Float[Tensor, "G ..."], is_valid: Bool[Tensor, "G ..."]
) -> Float[Tensor, "..."]:
    """Return which part of its G draft tokens each position loses on average; 0 where none is valid.

    ``1 - (1/G) sum_j prod_{i<=j} alpha_i``: early steps count most, because all later ones need them. The
    mean over the positions whose first step is valid is the loss. Flat where alpha is near 0, so a draft
    begins with cross-entropy.

    Source: Bebop (arXiv:2606.12370), equations 12 and 13.

    Args:
        acceptances: alpha of each step; carries gradient.
        is_valid: False where there is no token to draft, as behind the end of a document; nothing is
            accepted from there on.
    """
    lost = 1.0 - expected_accepted(acceptances, is_valid) / acceptances.shape[0]
    return lost.masked_fill(~is_valid[0], 0.0)


def expected_accepted(
    acceptances: Float[Tensor, "G ..."], is_valid: Bool[Tensor, "G ..."]
) -> Float[Tensor, "..."]:
    """Return how many draft tokens of each position are accepted on average [tokens].

    ``sum_j prod_{i<=j} alpha_i``; the token that the main model adds itself is not counted.

    Source: Bebop (arXiv:2606.12370), equation 12.
    """
    return acceptances.masked_fill(~is_valid, 0.0).cumprod(dim=0).sum(dim=0)
