"""Attention over a table of key rows: dense, and sparse over selected rows.

Shape letters: N queries, Q queries of one block, n heads, g key heads (1 in MLA's absorbed form),
P visible positions, S selected keys, R rows of the table, d key width, v value width (a value is the
first v numbers of its key).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longarc.models.plan import AttentionPlan, QueryRun, SingleQueries

GATHERED_FLOATS = 1 << 18
"""Upper bound on the gathered keys of one block of queries [numbers]: they should stay in the cache."""


def sparse_attention(
    query_Nnd: Float[Tensor, "N n d"],
    table_Rd: Float[Tensor, "R d"],
    rows_NS: Int[Tensor, "N S"],
    *,
    value_width: int,
    scale: float,
) -> tuple[Float[Tensor, "N n v"], Float[Tensor, "N S"]]:
    """Attend from each query to its own S rows of the table; -1 is no key.

    Every query has the same shapes whatever else is in the call, and keys are added up in the order
    of their index, so its numbers do not depend on how it was batched.

    Returns:
        The attended values, and the attention probabilities summed over heads (detached).
    """
    output: tuple[Tensor, Tensor] = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        query_Nnd, table_Rd, rows_NS, value_width, scale
    )
    return output


class _SparseAttention(torch.autograd.Function):
    """Gathers in blocks and gathers again in backward: the [N, S, d] keys are never kept."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, table: Tensor, rows: Tensor, value_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:2], value_width)
        probability_sum = query.new_empty(rows.shape)
        for block in _blocks(query, rows):
            keys_QSd = F.embedding(rows[block].clamp_min(0), table)
            probability_QnS = _probabilities(query[block], keys_QSd, rows[block], scale)
            output[block] = probability_QnS @ keys_QSd[..., :value_width]
            probability_sum[block] = probability_QnS.sum(dim=1)
        ctx.save_for_backward(query, table, rows)
        ctx.value_width, ctx.scale = value_width, scale
        ctx.mark_non_differentiable(probability_sum)
        return output, probability_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, table, rows = ctx.saved_tensors
        v, scale = ctx.value_width, ctx.scale
        grad_query = torch.empty_like(query)
        grad_table = torch.zeros_like(table)
        for block in _blocks(query, rows):
            safe_QS = rows[block].clamp_min(0)
            query_Qnd, grad_Qnv = query[block], grad[block]
            keys_QSd = F.embedding(safe_QS, table)
            p_QnS = _probabilities(query_Qnd, keys_QSd, rows[block], scale)
            grad_p_QnS = grad_Qnv @ keys_QSd[..., :v].mT
            # A padded key has p = 0, hence no gradient, and adding it to row 0 changes nothing.
            grad_score_QnS = (
                p_QnS * (grad_p_QnS - (p_QnS * grad_p_QnS).sum(-1, keepdim=True)) * scale
            )
            grad_query[block] = grad_score_QnS @ keys_QSd
            grad_keys_QSd = grad_score_QnS.mT @ query_Qnd
            grad_keys_QSd[..., :v] += p_QnS.mT @ grad_Qnv
            grad_table.index_add_(0, safe_QS.flatten(), grad_keys_QSd.flatten(0, 1))
        return grad_query, grad_table, None, None, None


def _blocks(query: Tensor, rows: Tensor) -> list[slice]:
    size = max(1, GATHERED_FLOATS // (rows.shape[1] * query.shape[2]))
    return [slice(start, start + size) for start in range(0, len(query), size)]


def _probabilities(query: Tensor, keys: Tensor, rows: Tensor, scale: float) -> Tensor:
    score_QnS = (query @ keys.mT) * scale
    return score_QnS.masked_fill_((rows < 0)[:, None], float("-inf")).softmax(dim=-1)


def dense_attention(
    query_Nnd: Float[Tensor, "N n d"],
    key_Rgd: Float[Tensor, "R g d"],
    value_Rgd: Float[Tensor, "R g d"],
    plan: AttentionPlan,
    *,
    scale: float,
) -> Float[Tensor, "N n d"]:
    """Attend from each query to every position of its sequence up to itself."""
    outputs = [_dense_run(query_Nnd, key_Rgd, value_Rgd, run, scale) for run in plan.runs]
    if plan.singles is None:
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    output_Nnd = torch.empty_like(query_Nnd)
    for run, output in zip(plan.runs, outputs, strict=True):
        output_Nnd[run.queries] = output
    output_Nnd[plan.singles.queries] = _dense_singles(
        query_Nnd, key_Rgd, value_Rgd, plan.singles, scale
    )
    return output_Nnd


def _dense_run(query: Tensor, key: Tensor, value: Tensor, run: QueryRun, scale: float) -> Tensor:
    mask = None
    if run.first_position:
        mask = torch.ones(
            run.num_queries, run.num_keys, dtype=torch.bool, device=query.device
        ).tril(run.first_position)
    attended = F.scaled_dot_product_attention(
        query[run.queries].transpose(0, 1)[None],
        key[run.key_rows].transpose(0, 1)[None],
        value[run.key_rows].transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _dense_singles(
    query: Tensor, key: Tensor, value: Tensor, singles: SingleQueries, scale: float
) -> Tensor:
    heads = key.shape[1]
    query_Bgmd = query[singles.queries].reshape(len(singles.num_keys), heads, -1, query.shape[2])
    key_BPgd = _split_heads(singles.key_window(key.flatten(1)), heads)
    value_BPgd = _split_heads(singles.key_window(value.flatten(1)), heads)
    score_BgmP = query_Bgmd @ key_BPgd.permute(0, 2, 3, 1) * scale
    score_BgmP = score_BgmP.masked_fill(singles.hidden_keys()[:, None, None], float("-inf"))
    return (score_BgmP.softmax(-1) @ value_BPgd.transpose(1, 2)).flatten(1, 2)


def _split_heads(rows: Tensor, heads: int) -> Tensor:
    return rows.view(*rows.shape[:-1], heads, -1)
