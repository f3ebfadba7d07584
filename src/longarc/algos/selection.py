"""Key selection of DeepSeek sparse attention (DSA), as GLM-5 uses it.

Shape suffixes: Q query positions of one block, K key positions, S selected keys per query.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

NO_KEY = -1
"""Index written where a query may attend to fewer than S keys."""


def select_keys(scores_QK: Float[Tensor, "Q K"], *, num_selected: int) -> Int[Tensor, "Q S"]:
    """Return the keys each query of a block attends to, ascending, NO_KEY last.

    The S best by score; equal scores go to the lower index. Invisible keys carry -inf and are never
    chosen.

    Selection must be reproducible: a trainer and an engine that pick different keys for the same
    token compute different log-probabilities, and the importance ratio then measures that
    disagreement and not the policy change. ReLU makes exact ties common (5 % of rows in a small
    model), and ``topk`` promises nothing about ties, hence the explicit rule: the S-th best value
    is a threshold, and ties at it are filled by index. Called per block of queries, so that no
    [S, T] tensor exists.

    Source: GLM-5, arXiv:2602.15763, section 3.2 (deterministic selection); the tie rule is ours.
    """
    num_queries, num_keys = scores_QK.shape
    visible_QK = scores_QK > float("-inf")
    if num_keys > num_selected:
        best_QS = scores_QK.topk(num_selected, dim=1, sorted=False).values
        threshold_Q1 = best_QS.amin(dim=1, keepdim=True)
        chosen_QK = (scores_QK >= threshold_Q1) & visible_QK
        if int(chosen_QK.sum(dim=1).amax()) > num_selected:
            chosen_QK = _drop_late_ties(scores_QK, threshold_Q1, chosen_QK, num_selected)
    else:
        chosen_QK = visible_QK
    return _positions(chosen_QK, num_selected)


def _drop_late_ties(
    scores_QK: Tensor, threshold_Q1: Tensor, chosen_QK: Tensor, num_selected: int
) -> Tensor:
    """Keep of the keys that tie at the threshold only as many, by index, as there is room for."""
    above_QK = scores_QK > threshold_Q1
    tied_QK = chosen_QK & ~above_QK
    room_Q1 = num_selected - above_QK.sum(dim=1, keepdim=True)
    return above_QK | (tied_QK & (tied_QK.cumsum(dim=1) <= room_Q1))


def _positions(chosen_QK: Tensor, num_selected: int) -> Tensor:
    """List the True columns of each row, ascending, NO_KEY after the last.

    ``nonzero`` runs through the mask in row order, so only the place where each row's list starts
    has to be found; a cumulative sum over the whole mask would cost several times more.
    """
    row_N, key_N = chosen_QK.nonzero(as_tuple=True)
    if len(row_N) == len(chosen_QK) * num_selected:
        return key_N.view(-1, num_selected)
    count_Q = chosen_QK.sum(dim=1)
    first_Q = count_Q.cumsum(dim=0) - count_Q
    slot_N = torch.arange(len(row_N), device=row_N.device) - first_Q[row_N]
    selected_QS = key_N.new_full((len(chosen_QK), num_selected), NO_KEY)
    selected_QS[row_N, slot_N] = key_N
    return selected_QS
