"""Sparse attention in plain torch that gathers the selected keys, block of queries by block.

Works in every dtype and on every device. Shape letters: N queries, Q queries of one block, n heads, S selected
keys, R rows of the table, d key width, v value width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

GATHERED_FLOATS = 1 << 18
"""Upper bound on the gathered keys of one block of queries [numbers]: they should stay in the cache."""


def gathered_attention(
    query_Nnd: Float[Tensor, "N n d"],
    table_Rd: Float[Tensor, "R d"],
    rows_NS: Int[Tensor, "N S"],
    *,
    value_width: int,
    scale: float,
    with_mass: bool = False,
) -> tuple[Float[Tensor, "N n v"], Float[Tensor, "N S"] | None]:
    """Attend from each query to its own rows; see `sparse_attention`, whose back-end this is."""
    output: tuple[Tensor, Tensor] = _GatheredAttention.apply(  # type: ignore[no-untyped-call]
        query_Nnd, table_Rd, rows_NS, value_width, scale, with_mass
    )
    return output[0], output[1] if with_mass else None


class _GatheredAttention(torch.autograd.Function):
    """Gathers in blocks and gathers again in backward: the [N, S, d] keys are never kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        table: Tensor,
        rows: Tensor,
        value_width: int,
        scale: float,
        with_mass: bool,
    ) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:2], value_width)
        mass = query.new_empty(rows.shape if with_mass else 0)
        for block in _blocks(query, rows):
            keys_QSd = F.embedding(_safe(rows[block]), table)
            probability_QnS = _probabilities(query[block], keys_QSd, rows[block], scale)
            output[block] = probability_QnS @ keys_QSd[..., :value_width]
            if with_mass:
                mass[block] = probability_QnS.sum(dim=1)
        ctx.save_for_backward(query, table, rows)
        ctx.value_width, ctx.scale = value_width, scale
        ctx.mark_non_differentiable(mass)
        return output, mass

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, table, rows = ctx.saved_tensors
        v, scale = ctx.value_width, ctx.scale
        grad_query = torch.empty_like(query)
        # In bf16 a row that a thousand queries list would lose what the last of them add.
        wide = torch.promote_types(table.dtype, torch.float32)
        grad_table = torch.zeros_like(table, dtype=wide)
        for block in _blocks(query, rows):
            safe_QS = _safe(rows[block])
            query_Qnd, grad_Qnv = query[block], grad[block]
            keys_QSd = F.embedding(safe_QS, table)
            p_QnS = _probabilities(query_Qnd, keys_QSd, rows[block], scale)
            grad_p_QnS = grad_Qnv @ keys_QSd[..., :v].mT
            # A padded key has p = 0, hence no gradient, and adding it to some row changes nothing.
            grad_score_QnS = torch.ops.aten._softmax_backward_data(
                grad_p_QnS, p_QnS, -1, p_QnS.dtype
            ).mul_(scale)
            grad_query[block] = grad_score_QnS @ keys_QSd
            # A row is key with its whole width and value with the first v numbers of it: one product.
            left_QmS = torch.cat([grad_score_QnS, p_QnS], dim=1)
            right_Qmd = torch.cat([query_Qnd, F.pad(grad_Qnv, (0, query.shape[2] - v))], dim=1)
            grad_keys_QSd = left_QmS.mT @ right_Qmd
            grad_table.index_add_(0, safe_QS.flatten(), grad_keys_QSd.flatten(0, 1).to(wide))
        return grad_query, grad_table.to(table.dtype), None, None, None, None


def _blocks(query: Tensor, rows: Tensor) -> list[slice]:
    size = max(1, GATHERED_FLOATS // (rows.shape[1] * query.shape[2]))
    return [slice(start, start + size) for start in range(0, len(query), size)]


def _safe(rows_QS: Tensor) -> Tensor:
    """Let padding read the query's first key: another sequence's row may be NaN, and 0 * NaN is NaN."""
    return torch.where(rows_QS < 0, rows_QS[:, :1].clamp_min(0), rows_QS)


def _probabilities(query: Tensor, keys: Tensor, rows: Tensor, scale: float) -> Tensor:
    score_QnS = (query @ keys.mT) * scale
    return score_QnS.masked_fill_((rows < 0)[:, None], float("-inf")).softmax(dim=-1)
