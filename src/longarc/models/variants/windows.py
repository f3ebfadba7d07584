"""Attention to a sliding window: each query sees the last W positions of its sequence, itself included.

Shape letters: N queries, Q queries of one block, P positions, S rows of a window, n heads, g key heads, d width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longarc.algos.selection import NO_KEY
from longarc.models.plan import AttentionPlan, QueryRun


def windowed_attention(
    query_Nnd: Float[Tensor, "N n d"],
    key_Rgd: Float[Tensor, "R g d"],
    value_Rgd: Float[Tensor, "R g d"],
    plan: AttentionPlan,
    *,
    window: int,
    scale: float,
) -> Float[Tensor, "N n d"]:
    """Attend from each query to its window, with a head of keys for several of queries.

    Blocks of queries read the keys of their windows together, so memory and time grow with N W. On the CPU,
    fp32 is added up in fp64 and rounded once, as in dense attention: training and decoding then agree.
    """
    output_Nnd = torch.zeros_like(query_Nnd)
    for run in plan.runs:
        pieces = [
            _attend_block(query_Nnd, key_Rgd, value_Rgd, block, window, scale)
            for block in run.blocks(max(64, window))
        ]
        queries = torch.arange(run.num_queries, device=query_Nnd.device) + run.first_query
        output_Nnd = output_Nnd.index_copy(0, queries, torch.cat(pieces))
    if plan.singles is not None:
        singles = plan.singles
        rows_BS = singles.rows_at(_last(singles.num_keys, min(window, singles.max_keys)))
        attended = _attend_rows(query_Nnd[singles.queries], key_Rgd, value_Rgd, rows_BS, scale)
        output_Nnd[singles.queries] = attended
    return output_Nnd


def _last(num_seen_Q: Tensor, size: int) -> Int[Tensor, "Q S"]:
    """Return the last ``size`` positions below each number, NO_KEY behind them where there are fewer."""
    first_Q1 = (num_seen_Q - size).clamp_min(0)[:, None]
    positions_QS = first_Q1 + torch.arange(size, device=num_seen_Q.device)
    return positions_QS.masked_fill(positions_QS >= num_seen_Q[:, None], NO_KEY)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, block: QueryRun, window: int, scale: float
) -> Tensor:
    first = max(0, block.first_position - window + 1)
    rows = block.key_rows
    rows = slice(rows.start + first, rows.stop) if isinstance(rows, slice) else rows[first:]
    position_Q1 = torch.arange(block.first_position, block.num_keys, device=query.device)[:, None]
    position_P = torch.arange(first, block.num_keys, device=query.device)
    visible_QP = (position_P <= position_Q1) & (position_P > position_Q1 - window)
    attended = F.scaled_dot_product_attention(
        _wide(query[block.queries]).transpose(0, 1)[None],
        _wide(key[rows]).transpose(0, 1)[None],
        _wide(value[rows]).transpose(0, 1)[None],
        attn_mask=visible_QP,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1).to(query.dtype)


def _attend_rows(
    query_Bnd: Tensor, key: Tensor, value: Tensor, rows_BS: Tensor, scale: float
) -> Tensor:
    """Attend from one query of each of several sequences to rows of its own."""
    # Padding reads the query's first key, for another sequence's row may be NaN, and 0 * NaN is NaN.
    safe_BS = torch.where(rows_BS < 0, rows_BS[:, :1], rows_BS)
    repeats = query_Bnd.shape[1] // key.shape[1]
    key_BnSd, value_BnSd = (
        _wide(table[safe_BS]).transpose(1, 2).repeat_interleave(repeats, dim=1)
        for table in (key, value)
    )
    score_BnS = (key_BnSd @ _wide(query_Bnd)[..., None])[..., 0] * scale
    hidden_B1S = (rows_BS < 0)[:, None]
    probability_BnS = score_BnS.masked_fill(hidden_B1S, float("-inf")).softmax(-1)
    return (probability_BnS[:, :, None] @ value_BnSd)[:, :, 0].to(query_Bnd.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.dtype is torch.float32 and x.device.type == "cpu" else x
