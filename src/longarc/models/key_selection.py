"""Key selection: the index scores of every visible key, and for each query the rows of the best.

``I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s])``; the S best by score, equal scores to the lower position. The
back-ends are those of `longarc.models.sparse_attention`, and like them they choose the same rows: the reference sorts,
the others look for the S-th best value and fill ties by position.

Source: GLM-5, arXiv:2602.15763, section 3.2. Shape letters: T padded rows, N queries, Q queries of one block, j index
heads, i index width, P positions, S selected keys, R rows of the key table.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.algos.selection import NO_KEY, select_keys
from longarc.models.kernels import attention as native_attention
from longarc.models.kernels.attention import FlatRuns
from longarc.models.kernels.key_lists import KeyLists
from longarc.models.plan import AttentionPlan, QueryRun, SingleQueries
from longarc.models.sparse_attention import Backend

SCORED_FLOATS = 1 << 18
"""Upper bound on the scores of one block of queries, all heads [numbers]."""


@dataclass(frozen=True, slots=True)
class IndexerRows:
    """What the indexer computes for each token."""

    query: Float[Tensor, "T j i"]
    key: Float[Tensor, "T i"]
    weight: Float[Tensor, "T j"]
    """Weight of each head, with both scale factors."""


@torch.no_grad()
def select_rows(
    rows: IndexerRows,
    table_Ri: Float[Tensor, "R i"],
    plan: AttentionPlan,
    *,
    num_selected: int,
    backend: Backend,
    flat_runs: FlatRuns | None = None,
    key_lists: KeyLists | None = None,
) -> Int[Tensor, "N S"]:
    """Return the table rows each query attends to, by ascending position, -1 last.

    The width is always ``num_selected``, so that a query has the same shapes in every batch. A query that has to
    choose among scores of which one is NaN gets no row.

    Args:
        rows: of the queries.
        table_Ri: keys.
        plan: which queries see which keys.
        num_selected: S.
        backend: which one does the work.
        flat_runs: the plan for the native kernels; without it cpu is plain torch.
        key_lists: the plan for triton; made here if need be.
    """
    if backend == "reference":
        return _sorted_selection(rows, table_Ri, plan, num_selected)
    if backend == "triton":
        from longarc.models.kernels.triton.selection import select

        lists = key_lists or plan.key_lists(len(table_Ri), table_Ri.device)
        return select(lists, rows.query, rows.weight, table_Ri, num_selected=num_selected)
    if flat_runs is not None:
        return native_attention.select(
            flat_runs, rows.query, rows.weight, table_Ri, num_selected=num_selected
        )
    selected_NS = torch.empty(
        plan.num_queries, num_selected, dtype=torch.long, device=table_Ri.device
    )
    for run in plan.runs:
        keys_Pi = table_Ri[run.key_rows]
        size = max(1, SCORED_FLOATS // (rows.query.shape[1] * run.num_keys))
        for block in run.blocks(size):
            positions_QS = _select_block(rows, keys_Pi[: block.num_keys], block, num_selected)
            selected_NS[block.queries] = block.rows_at(positions_QS)
    if plan.singles is not None:
        positions_BS = _select_singles(rows, table_Ri, plan.singles, num_selected)
        selected_NS[plan.singles.queries] = plan.singles.rows_at(positions_BS)
    return selected_NS


def _sorted_selection(
    rows: IndexerRows, table_Ri: Tensor, plan: AttentionPlan, num_selected: int
) -> Tensor:
    """Score and sort query by query, as the definition reads."""
    selected_NS = torch.full(
        (plan.num_queries, num_selected), NO_KEY, dtype=torch.long, device=table_Ri.device
    )
    for query, row_P in plan.visible_rows(table_Ri.device):
        dot_jP = rows.query[query].to(rows.weight.dtype) @ table_Ri[row_P].to(rows.weight.dtype).mT
        score_P = (dot_jP.relu() * rows.weight[query][:, None]).sum(dim=0)
        if len(score_P) > num_selected and bool(score_P.isnan().any()):
            continue  # no order, no key
        best_S = score_P.sort(descending=True, stable=True).indices[:num_selected].sort().values
        selected_NS[query, : len(best_S)] = row_P[best_S]
    return selected_NS


def _select_block(rows: IndexerRows, keys_Pi: Tensor, block: QueryRun, num_selected: int) -> Tensor:
    position_Q1 = torch.arange(block.first_position, block.num_keys, device=keys_Pi.device)[:, None]
    if block.num_keys <= num_selected:
        candidate_S = torch.arange(num_selected, device=keys_Pi.device)
        return torch.where(candidate_S <= position_Q1, candidate_S, NO_KEY)
    scores_QP = index_scores(rows.query[block.queries], rows.weight[block.queries], keys_Pi)
    future_QP = torch.arange(block.num_keys, device=keys_Pi.device) > position_Q1
    return select_keys(scores_QP.masked_fill_(future_QP, float("-inf")), num_selected=num_selected)


def _select_singles(
    rows: IndexerRows, table_Ri: Tensor, singles: SingleQueries, num_selected: int
) -> Tensor:
    if singles.max_keys <= num_selected:
        candidate_S = torch.arange(num_selected, device=table_Ri.device)
        return torch.where(candidate_S < singles.num_keys[:, None], candidate_S, NO_KEY)
    scores_BP = index_scores_batched(
        rows.query[singles.queries], rows.weight[singles.queries], singles.key_window(table_Ri)
    )
    return select_keys(
        scores_BP.masked_fill_(singles.hidden_keys(), float("-inf")), num_selected=num_selected
    )


def index_scores(
    query_Qji: Float[Tensor, "Q j i"], weight_Qj: Float[Tensor, "Q j"], key_Pi: Float[Tensor, "P i"]
) -> Float[Tensor, "Q P"]:
    """Score all keys for each query of a block."""
    query_Xi = full_precision(query_Qji).flatten(0, 1)
    dot_QjP = (query_Xi @ full_precision(key_Pi).mT).view(*query_Qji.shape[:2], -1)
    return _sum_heads(dot_QjP, weight_Qj)


def index_scores_batched(
    query_Bji: Float[Tensor, "B j i"],
    weight_Bj: Float[Tensor, "B j"],
    key_BPi: Float[Tensor, "B P i"],
) -> Float[Tensor, "B P"]:
    """Score for each query its own keys."""
    return _sum_heads(full_precision(query_Bji) @ full_precision(key_BPi).mT, weight_Bj)


def _sum_heads(dot_QjP: Tensor, weight_Qj: Tensor) -> Tensor:
    """Add the heads up one after another: a fixed order, whatever the shape."""
    first, second, *others = (dot_QjP.relu_() * weight_Qj[..., None]).unbind(1)
    total_QP = first + second
    for head_QP in others:
        total_QP += head_QP
    return total_QP


def full_precision(x: Tensor) -> Tensor:
    """Scores are compared, so they are computed in fp32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
