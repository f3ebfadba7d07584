"""Key selection of DeepSeek sparse attention (DSA), as GLM-5 uses it.

Shape suffixes: Q query positions of one block, K key positions, S selected keys per query.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NO_KEY = -1
"""Index written where a query may attend to fewer than S keys."""


def select_keys(scores_QK: Float[Tensor, "Q K"], *, num_selected: int) -> Int[Tensor, "Q S"]:
    """Return the keys each query of a block attends to, ascending, NO_KEY last.

    The first S of ``sort by (-score, index)``: equal scores go to the lower index. Invisible keys carry
    -inf and are never chosen.

    Selection must be reproducible: a trainer and an engine that pick different keys for the same
    token compute different log-probabilities, and the importance ratio then measures that
    disagreement and not the policy change. ReLU makes exact ties common (5 % of rows in a small
    model), and ``topk`` promises nothing about ties, hence the explicit rule: the S-th best value
    is a threshold, and ties at it are filled by index. Called per block of queries, so that no
    [S, T] tensor exists.

    NaN has no place in an order: a query that has one among more keys than it may read gets none at all, so
    that its attention is NaN too, and nobody takes it for a result.

    Source: GLM-5, arXiv:2602.15763, section 3.2 (deterministic selection); the tie rule is ours.
    """
    scores_QK = scores_QK.detach()
    if scores_QK.shape[1] <= num_selected:
        return _positions(scores_QK != float("-inf"), num_selected)
    threshold_Q1 = _nth_best(scores_QK, num_selected)
    chosen_QK = scores_QK >= threshold_Q1
    if bool((threshold_Q1 == float("-inf")).any()):
        chosen_QK &= scores_QK > float("-inf")
    if int(chosen_QK.sum(dim=1).amax()) > num_selected:
        above_QK = scores_QK > threshold_Q1
        tied_QK = chosen_QK & ~above_QK
        room_Q1 = num_selected - above_QK.sum(dim=1, keepdim=True)
        chosen_QK = above_QK | (tied_QK & (tied_QK.cumsum(dim=1) <= room_Q1))
    is_broken_Q1 = scores_QK.amax(dim=1, keepdim=True).isnan()
    if bool(is_broken_Q1.any()):
        visible_QK = scores_QK != float("-inf")
        is_few_Q1 = visible_QK.sum(dim=1, keepdim=True) <= num_selected
        chosen_QK = torch.where(is_broken_Q1, visible_QK & is_few_Q1, chosen_QK)
    return _positions(chosen_QK, num_selected)


def _nth_best(scores_QK: Tensor, n: int) -> Float[Tensor, "Q 1"]:
    """Return the n-th largest value of each row."""
    find = _nth_best_by_numpy if scores_QK.device.type == "cpu" else _nth_best_by_torch
    return find(scores_QK, n)


def _nth_best_by_numpy(scores_QK: Tensor, n: int) -> Float[Tensor, "Q 1"]:
    """Return it on a CPU: numpy's vectorised partition takes a fifth of the time of topk."""
    nth = scores_QK.shape[1] - n
    return torch.from_numpy(np.partition(scores_QK.numpy(), nth, axis=1)[:, nth : nth + 1])


def _nth_best_by_torch(scores_QK: Tensor, n: int) -> Float[Tensor, "Q 1"]:
    """Return it on any device."""
    return scores_QK.topk(n, dim=1, sorted=False).values.amin(dim=1, keepdim=True)


def _flat_positions(chosen_QK: Bool[Tensor, "Q K"]) -> Int[Tensor, " N"]:
    """Return the indices of True, row after row."""
    is_cpu = chosen_QK.device.type == "cpu"
    find = _flat_positions_by_numpy if is_cpu else _flat_positions_by_torch
    return find(chosen_QK)


def _flat_positions_by_numpy(chosen_QK: Bool[Tensor, "Q K"]) -> Int[Tensor, " N"]:
    """Return them on a CPU."""
    return torch.from_numpy(np.flatnonzero(chosen_QK.numpy()))


def _flat_positions_by_torch(chosen_QK: Bool[Tensor, "Q K"]) -> Int[Tensor, " N"]:
    """Return them on any device."""
    return chosen_QK.flatten().nonzero()[:, 0]


def _positions(chosen_QK: Bool[Tensor, "Q K"], num_selected: int) -> Int[Tensor, "Q S"]:
    """List the True columns of each row, ascending, NO_KEY after the last."""
    num_queries, num_keys = chosen_QK.shape
    flat_N = _flat_positions(chosen_QK)
    if len(flat_N) == num_queries * num_selected:
        # Every list is full, for none is longer: the flat indices are the answer, row after row.
        first_Q1 = torch.arange(num_queries, device=flat_N.device)[:, None] * num_keys
        return flat_N.view(num_queries, num_selected) - first_Q1
    row_N = flat_N // num_keys
    count_Q = chosen_QK.sum(dim=1)
    first_Q = count_Q.cumsum(dim=0) - count_Q
    slot_N = torch.arange(len(row_N), device=row_N.device) - first_Q[row_N]
    selected_QS = flat_N.new_full((num_queries, num_selected), NO_KEY)
    selected_QS[row_N, slot_N] = flat_N - row_N * num_keys
    return selected_QS
