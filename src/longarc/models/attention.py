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
            keys_QSd = F.embedding(_safe(rows[block]), table)
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
            grad_table.index_add_(0, safe_QS.flatten(), grad_keys_QSd.flatten(0, 1))
        return grad_query, grad_table, None, None, None


def _blocks(query: Tensor, rows: Tensor) -> list[slice]:
    size = max(1, GATHERED_FLOATS // (rows.shape[1] * query.shape[2]))
    return [slice(start, start + size) for start in range(0, len(query), size)]


def _safe(rows_QS: Tensor) -> Tensor:
    """Let padding read the query's first key: another sequence's row may be NaN, and 0 * NaN is NaN."""
    return torch.where(rows_QS < 0, rows_QS[:, :1].clamp_min(0), rows_QS)


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
    outputs, order = [], []
    for runs in _runs_by_shape(plan.runs):
        outputs.append(_dense_runs(query_Nnd, key_Rgd, value_Rgd, runs, scale))
        order.extend(runs)
    if plan.singles is not None:
        outputs.append(_dense_singles(query_Nnd, key_Rgd, value_Rgd, plan.singles, scale))
    output_Nnd = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.singles is None and order == list(plan.runs):
        return output_Nnd
    packed_N = torch.arange(len(output_Nnd), device=output_Nnd.device)
    sources = [packed_N[run.queries] for run in order]
    if plan.singles is not None:
        sources.append(packed_N[plan.singles.queries])
    place_N = torch.empty_like(packed_N)
    place_N[torch.cat(sources)] = packed_N
    return output_Nnd.index_select(0, place_N)


def _runs_by_shape(runs: tuple[QueryRun, ...]) -> list[list[QueryRun]]:
    """Put runs of one shape together, in the order of their first appearance."""
    groups: dict[tuple[int, int], list[QueryRun]] = {}
    for run in runs:
        groups.setdefault((run.num_queries, run.num_keys), []).append(run)
    return list(groups.values())


def _dense_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: list[QueryRun], scale: float
) -> Tensor:
    """Attend in several runs of one shape; return their queries' results one after another."""
    first = runs[0]
    mask = None
    if first.first_position:
        shape = (first.num_queries, first.num_keys)
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(first.first_position)
    attended = F.scaled_dot_product_attention(
        _wide(torch.stack([query[run.queries] for run in runs])).transpose(1, 2),
        _wide(torch.stack([key[run.key_rows] for run in runs])).transpose(1, 2),
        _wide(torch.stack([value[run.key_rows] for run in runs])).transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended.transpose(1, 2).flatten(0, 1).to(query.dtype)


def _wide(x: Tensor) -> Tensor:
    """Turn fp32 on the CPU into fp64.

    The order in which attention adds up depends on how many queries and keys stand beside each other: an
    engine that decodes token by token would round differently from a trainer that sees all tokens at once,
    by about 1e-5 in the log-probabilities. In fp64, rounded at the end, the order does not show.
    """
    return x.double() if x.dtype is torch.float32 and x.device.type == "cpu" else x


def _dense_singles(
    query: Tensor, key: Tensor, value: Tensor, singles: SingleQueries, scale: float
) -> Tensor:
    """Attend from one query per cached sequence, key head by key head: products on views, no copies."""
    num_heads = key.shape[1]
    heads_of_key = query[singles.queries].chunk(num_heads, dim=1)
    window = (len(singles.num_keys), singles.max_keys)
    key_BPgd = singles.key_window(key.flatten(1)).view(*window, *key.shape[1:])
    value_BPgd = singles.key_window(value.flatten(1)).view(*window, *value.shape[1:])
    hidden_BP = singles.hidden_keys()
    outputs = []
    for head, query_Bmd in enumerate(heads_of_key):
        score_BmP = _wide(query_Bmd) @ _wide(key_BPgd[:, :, head]).mT * scale
        probability_BmP = score_BmP.masked_fill_(hidden_BP[:, None], float("-inf")).softmax(-1)
        value_BPd = _wide(value_BPgd[:, :, head])
        output_Bmd = probability_BmP @ value_BPd
        if not bool(output_Bmd.isfinite().all()):
            # A row behind the end may hold NaN of an earlier sequence, and 0 * NaN is NaN.
            output_Bmd = probability_BmP @ value_BPd.masked_fill(hidden_BP[..., None], 0.0)
        outputs.append(output_Bmd)
    return torch.cat(outputs, dim=1).to(query.dtype)
