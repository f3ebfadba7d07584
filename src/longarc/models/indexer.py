"""The lightning indexer: scores every earlier token cheaply, so that attention reads only the best.

Source: GLM-5, arXiv:2602.15763, section 3.2; DeepSeek-V3.2 (DSA). Tensor names and layout are those of
Hugging Face ``GlmMoeDsa``: in each index head the rotated dimensions come first.

Shape letters: T padded rows, N queries, Q queries of one block, j index heads, i index width,
P positions, S selected keys, R rows of the key table, L layers that use one selection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longarc.algos.index_share import shared_index_loss
from longarc.algos.selection import NO_KEY, select_keys
from longarc.config.model import GlmMoeDsaConfig
from longarc.models.kernels import attention as native_attention
from longarc.models.kernels import rows as native_rows
from longarc.models.kernels.attention import FlatRuns
from longarc.models.kernels.native import native_for
from longarc.models.layers import Linear, Rotation
from longarc.models.plan import AttentionPlan, QueryRun, SingleQueries

SCORED_FLOATS = 1 << 18
"""Upper bound on the scores of one block of queries, all heads [numbers]."""
MIN_HEADS = 4
"""A product of fewer rows takes another kernel, which rounds differently; heads are padded to this."""


@dataclass(frozen=True, slots=True)
class IndexerRows:
    """What the indexer computes for each token."""

    query: Float[Tensor, "T j i"]
    key: Float[Tensor, "T i"]
    weight: Float[Tensor, "T j"]
    """Weight of each head, with both scale factors."""


class Indexer(nn.Module):
    """``I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s])``."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        self._num_heads, self._width = config.index_n_heads, config.index_head_dim
        self._rope_width = config.qk_rope_head_dim
        self._num_selected = config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self._num_heads * self._width)
        self.wk = Linear(config.hidden_size, self._width)
        self.k_norm = nn.LayerNorm(self._width, eps=1e-6)
        self.weights_proj = Linear(config.hidden_size, self._num_heads)

    def project(
        self, x: Float[Tensor, "T hidden"], q_latent: Float[Tensor, "T rank"], rotation: Rotation
    ) -> IndexerRows:
        """Compute queries, keys and head weights of all rows; no gradient leaves towards the inputs."""
        x, q_latent = x.detach(), q_latent.detach()
        query = self.wq_b(q_latent).unflatten(1, (self._num_heads, self._width))
        key = self._normed(self.wk(x))[:, None]
        both = torch.cat([query, key], dim=1)
        r = self._rope_width
        both = torch.cat([rotation.apply(both[..., :r]), both[..., r:]], dim=-1)
        scale = float(self._num_heads * self._width) ** -0.5
        weight = _full_precision(self.weights_proj(x)) * scale
        query, key = both[:, :-1], both[:, -1]
        if self._num_heads < MIN_HEADS:
            missing = MIN_HEADS - self._num_heads
            query = F.pad(query, (0, 0, 0, missing))
            weight = F.pad(weight, (0, missing))
        return IndexerRows(query, key, weight)

    def _normed(self, key: Tensor) -> Tensor:
        norm = self.k_norm
        if not torch.is_grad_enabled() and native_for(key, norm.weight):
            return native_rows.layer_norm(key, norm.weight, norm.bias, norm.eps)
        normed: Tensor = norm(key)
        return normed

    @torch.no_grad()
    def select(
        self,
        rows: IndexerRows,
        table_Ri: Float[Tensor, "R i"],
        plan: AttentionPlan,
        flat_runs: FlatRuns | None = None,
    ) -> Int[Tensor, "N S"]:
        """Return the table rows each query attends to, by ascending position, -1 last.

        The width is always ``index_topk``, so that a query has the same shapes in every batch.

        Args:
            rows: of the queries.
            table_Ri: keys.
            plan: which queries see which keys.
            flat_runs: the same, where the native kernels can do the work.
        """
        if flat_runs is not None:
            return native_attention.select(
                flat_runs, rows.query, rows.weight, table_Ri, num_selected=self._num_selected
            )
        num_queries = sum(run.num_queries for run in plan.runs)
        if plan.singles is not None:
            num_queries += len(plan.singles.num_keys)
        selected_NS = torch.empty(
            num_queries, self._num_selected, dtype=torch.long, device=table_Ri.device
        )
        for run in plan.runs:
            keys_Pi = table_Ri[run.key_rows]
            for block in run.blocks(self._block_size(run)):
                positions_QS = self._select_block(rows, keys_Pi[: block.num_keys], block)
                selected_NS[block.queries] = block.rows_at(positions_QS)
        if plan.singles is not None:
            positions_BS = self._select_singles(rows, table_Ri, plan.singles)
            selected_NS[plan.singles.queries] = plan.singles.rows_at(positions_BS)
        return selected_NS

    def _block_size(self, run: QueryRun) -> int:
        return max(1, SCORED_FLOATS // (max(self._num_heads, MIN_HEADS) * run.num_keys))

    def _select_block(self, rows: IndexerRows, keys_Pi: Tensor, block: QueryRun) -> Tensor:
        position_Q1 = torch.arange(block.first_position, block.num_keys, device=keys_Pi.device)[
            :, None
        ]
        if block.num_keys <= self._num_selected:
            candidate_S = torch.arange(self._num_selected, device=keys_Pi.device)
            return torch.where(candidate_S <= position_Q1, candidate_S, NO_KEY)
        scores_QP = index_scores(rows.query[block.queries], rows.weight[block.queries], keys_Pi)
        future_QP = torch.arange(block.num_keys, device=keys_Pi.device) > position_Q1
        return select_keys(
            scores_QP.masked_fill_(future_QP, float("-inf")), num_selected=self._num_selected
        )

    def _select_singles(
        self, rows: IndexerRows, table_Ri: Tensor, singles: SingleQueries
    ) -> Tensor:
        if singles.max_keys <= self._num_selected:
            candidate_S = torch.arange(self._num_selected, device=table_Ri.device)
            return torch.where(candidate_S < singles.num_keys[:, None], candidate_S, NO_KEY)
        scores_BP = index_scores_batched(
            rows.query[singles.queries],
            rows.weight[singles.queries],
            singles.key_window(table_Ri),
        )
        return select_keys(
            scores_BP.masked_fill_(singles.hidden_keys(), float("-inf")),
            num_selected=self._num_selected,
        )

    @staticmethod
    def sparse_loss(
        rows: IndexerRows,
        selected_NS: Int[Tensor, "N S"],
        attention: Sequence[Float[Tensor, "N S"]],
        *,
        stride: int = 1,
    ) -> Float[Tensor, ""]:
        """Sum over every ``stride``-th query ``KL(p || softmax of I)``, both over the selected keys.

        A mean over the layers that use the selection. Source: GLM-5, section 3.2; DeepSeek-V3.2, equation 4;
        IndexCache, section 3.2.

        Args:
            rows: of all tokens; carries gradient.
            selected_NS: rows of the packed tokens.
            attention: of each layer, probabilities summed over heads; constant.
            stride: how many queries there are for each one that is looked at.
        """
        query, weight = (
            rows.query[: len(selected_NS) : stride],
            rows.weight[: len(selected_NS) : stride],
        )
        selected_NS = selected_NS[::stride]
        attention = [attention_NS[::stride] for attention_NS in attention]
        size = max(1, SCORED_FLOATS // (selected_NS.shape[1] * rows.key.shape[1]))
        total = rows.key.new_zeros(())
        for start in range(0, len(selected_NS), size):
            block = slice(start, start + size)
            attention_LQS = torch.stack([attention_NS[block] for attention_NS in attention])
            total = total + _gathered_kl(
                query[block], weight[block], rows.key, selected_NS[block], attention_LQS
            )
        return total

    @staticmethod
    def warmup_loss(
        rows: IndexerRows,
        run: QueryRun,
        attention_QP: Float[Tensor, "Q P"],
    ) -> Float[Tensor, ""]:
        """Sum over the queries of a block ``KL(p || softmax of I)`` over all positions up to the query.

        Source: GLM-5, section 3.2; DeepSeek-V3.2, equation 3.

        Args:
            rows: of all tokens; carries gradient.
            run: the block of queries.
            attention_QP: dense attention probabilities summed over heads, 0 where invisible; constant.
        """
        loss: Tensor = checkpoint(
            _full_kl,
            rows.query[run.queries],
            rows.weight[run.queries],
            rows.key[run.key_rows],
            run.first_position,
            attention_QP,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return loss


def index_scores(
    query_Qji: Float[Tensor, "Q j i"], weight_Qj: Float[Tensor, "Q j"], key_Pi: Float[Tensor, "P i"]
) -> Float[Tensor, "Q P"]:
    """Score all keys for each query of a block."""
    query_Xi = _full_precision(query_Qji).flatten(0, 1)
    dot_QjP = (query_Xi @ _full_precision(key_Pi).mT).view(*query_Qji.shape[:2], -1)
    return _sum_heads(dot_QjP, weight_Qj)


def index_scores_batched(
    query_Bji: Float[Tensor, "B j i"],
    weight_Bj: Float[Tensor, "B j"],
    key_BPi: Float[Tensor, "B P i"],
) -> Float[Tensor, "B P"]:
    """Score for each query its own keys."""
    return _sum_heads(_full_precision(query_Bji) @ _full_precision(key_BPi).mT, weight_Bj)


def _sum_heads(dot_QjP: Tensor, weight_Qj: Tensor) -> Tensor:
    """Add the heads up one after another: a fixed order, whatever the shape."""
    first, second, *others = (dot_QjP.relu_() * weight_Qj[..., None]).unbind(1)
    total_QP = first + second
    for head_QP in others:
        total_QP += head_QP
    return total_QP


def _full_precision(x: Tensor) -> Tensor:
    """Scores are compared, so they are computed in fp32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gathered_kl(
    query: Tensor, weight: Tensor, key_Ri: Tensor, selected_QS: Tensor, attention_LQS: Tensor
) -> Tensor:
    keys_QSi = F.embedding(selected_QS.clamp_min(0), key_Ri)
    scores_QS = index_scores_batched(query, weight, keys_QSi)
    return shared_index_loss(attention_LQS, scores_QS, selected_QS < 0)


def _full_kl(
    query: Tensor, weight: Tensor, key_Pi: Tensor, first_position: int, attention_QP: Tensor
) -> Tensor:
    scores_QP = index_scores(query, weight, key_Pi)
    hidden_QP = torch.ones_like(scores_QP, dtype=torch.bool).triu(first_position + 1)
    return shared_index_loss(attention_QP[None], scores_QP, hidden_QP)
