"""Rejection sampling of drafted tokens: what is kept is distributed as if the main model had sampled alone.

::

    draft d_1 .. d_D, d_i ~ q_i          main model: p_1 .. p_{D+1} in one pass over the drafts
    d_i is accepted with probability min(1, p_i(d_i) / q_i(d_i)), given that those before it were
    behind the first a accepted drafts one more token:
        ~ max(p_{a+1} - q_{a+1}, 0), normalised    where a draft was refused
        ~ p_{D+1}                                  where none was

Source: Leviathan, Kalman and Matias, arXiv:2211.17192, algorithm 1 and appendix A.1; Chen et al., arXiv:2302.01318.

Shape letters: B sequences, D drafts, T = D + 1, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verified:
    """What becomes of the drafts of each sequence."""

    num_accepted: Int[Tensor, " B"]
    """Drafts that stay, from the first on."""
    next_ids: Int[Tensor, " B"]
    """The token behind them."""


def verified(
    main_BTV: Float[Tensor, "B T V"],
    draft_BDV: Float[Tensor, "B D V"],
    draft_ids_BD: Int[Tensor, "B D"],
    accepts_BD: Float[Tensor, "B D"],
    draws_BT: Float[Tensor, "B T"],
) -> Verified:
    """Accept drafts from the first on, and draw the token behind them.

    Args:
        main_BTV: the main model's probabilities, [B, D + 1, V]: at the position of each draft, and behind the last.
            A row for greedy sampling is 1 at the likeliest token.
        draft_BDV: probabilities that each draft was drawn from.
        draft_ids_BD: the drafts.
        accepts_BD: a uniform number in [0, 1) for each draft.
        draws_BT: one for the token at each place; that of the place behind the drafts that stay is used.
    """
    main_BTV, draft_BDV = main_BTV.double(), draft_BDV.double()
    num_drafts = draft_ids_BD.shape[1]
    is_accepted_BD = accepts_BD < acceptance_probability(
        main_BTV[:, :num_drafts], draft_BDV, draft_ids_BD
    )
    num_accepted_B = is_accepted_BD.long().cumprod(dim=1).sum(dim=1)
    rows_B = torch.arange(len(draft_ids_BD), device=draft_ids_BD.device)
    at_end_BV = main_BTV[rows_B, num_accepted_B]
    is_refused_B = num_accepted_B < num_drafts
    refused_B = num_accepted_B.clamp(max=max(num_drafts - 1, 0))
    if num_drafts:
        left_BV = residual(at_end_BV, draft_BDV[rows_B, refused_B])
        at_end_BV = torch.where(is_refused_B[:, None], left_BV, at_end_BV)
    return Verified(num_accepted_B, inverse_cdf(at_end_BV, draws_BT[rows_B, num_accepted_B]))


def acceptance_probability(
    main: Float[Tensor, "*batch V"],
    draft: Float[Tensor, "*batch V"],
    draft_ids: Int[Tensor, " *batch"],
) -> Float[Tensor, " *batch"]:
    """Return ``min(1, p(d) / q(d))``; 0 where the main model cannot say d."""
    p = main.gather(-1, draft_ids[..., None])[..., 0]
    q = draft.gather(-1, draft_ids[..., None])[..., 0]
    # A draft that its own distribution excludes was not drawn from it: refusing it is always right.
    return torch.where(q > 0, p / q.clamp_min(torch.finfo(q.dtype).tiny), 0.0).clamp(max=1.0)


def residual(
    main: Float[Tensor, "*batch V"], draft: Float[Tensor, "*batch V"]
) -> Float[Tensor, "*batch V"]:
    """Return what is left to draw from after a refusal: ``max(p - q, 0)``, normalised.

    Equal distributions refuse nothing; rounding may say otherwise, and then ``p`` itself is left.
    """
    left = (main - draft).clamp_min(0.0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(torch.finfo(left.dtype).tiny), main)


def inverse_cdf(
    probability_BV: Float[Tensor, "B V"], draws_B: Float[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Draw a token from each row at its uniform number; one of probability zero is never drawn."""
    cumulative_BV = probability_BV.double().cumsum(dim=-1)
    totals_B1 = cumulative_BV[:, -1:].contiguous()
    tokens_B = torch.searchsorted(cumulative_BV, draws_B.double()[:, None] * totals_B1, right=True)
    # Rounding can put a draw on the very end; the last token with any probability is the right one.
    return torch.minimum(tokens_B, torch.searchsorted(cumulative_BV, totals_B1))[:, 0]
