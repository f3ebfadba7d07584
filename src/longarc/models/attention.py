"""Dense attention over a table of key rows, in plain torch.

Shape letters: N queries, n heads, g key heads (1 in MLA's absorbed form), P visible positions, R rows of
the table, d key width, v value width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longarc.models.plan import AttentionPlan, QueryRun, SingleQueries


def dense_attention(
    query_Nnd: Float[Tensor, "N n d"],
    key_Rgd: Float[Tensor, "R g d"],
    value_Rgv: Float[Tensor, "R g v"],
    plan: AttentionPlan,
    *,
    scale: float,
) -> Float[Tensor, "N n v"]:
    """Attend from each query to every position of its sequence up to itself."""
    outputs, order = [], []
    for runs in _runs_by_shape(plan.runs):
        outputs.append(_dense_runs(query_Nnd, key_Rgd, value_Rgv, runs, scale))
        order.extend(runs)
    if plan.singles is not None:
        outputs.append(_dense_singles(query_Nnd, key_Rgd, value_Rgv, plan.singles, scale))
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
