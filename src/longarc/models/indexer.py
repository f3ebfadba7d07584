"""The lightning indexer: scores every earlier token cheaply, so that attention reads only the best.

Source: GLM-5, arXiv:2602.15763, section 3.2; DeepSeek-V3.2 (DSA). Tensor names and layout are those of
Hugging Face ``GlmMoeDsa``: in each index head the rotated dimensions come first.

Shape letters: T padded rows, N queries, Q queries of one block, j index heads, i index width,
P positions, S selected keys, R rows of the key table, L layers that use one selection.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longarc.algos.index_share import shared_index_loss
from longarc.config.model import GlmMoeDsaConfig
from longarc.errors import ContractError
from longarc.models.decoder_base import Pass
from longarc.models.kernels import rows as native_rows
from longarc.models.kernels.native import native_for
from longarc.models.key_selection import (
    IndexerRows,
    full_precision,
    index_scores,
    index_scores_batched,
    select_rows,
)
from longarc.models.layers import Linear, Rotation
from longarc.models.plan import QueryRun

SCORED_FLOATS = 1 << 18
"""Upper bound on the scores of one block of queries, all heads [numbers], where the indexer learns."""
MIN_HEADS = 4
"""A product of fewer rows takes another kernel, which rounds differently; heads are padded to this."""


class Indexer(nn.Module):
    """``I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s])``."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        self._num_heads, self._width = config.index_n_heads, config.index_head_dim
        self._rope_width = config.qk_rope_head_dim
        self._num_selected = config.num_selected
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
        weight = full_precision(self.weights_proj(x)) * scale
        query, key = both[:, :-1], both[:, -1]
        if self._num_heads < MIN_HEADS:
            missing = MIN_HEADS - self._num_heads
            query = F.pad(query, (0, 0, 0, missing))
            weight = F.pad(weight, (0, missing))
        return IndexerRows(query, key, weight)

    @staticmethod
    def check_finite(rows: IndexerRows, layer: int) -> None:
        """Refuse rows whose scores would be NaN: no order of keys means anything then.

        One sum per tensor, so that it can stand in every training step; NaN and infinity survive it.

        Args:
            rows: of the tokens.
            layer: for the message.

        Raises:
            ContractError: names the layer and the first token.
        """
        parts = {"query": rows.query, "key": rows.key, "weight": rows.weight}
        total = sum(part.detach().sum(dtype=rows.weight.dtype) for part in parts.values())
        if bool(torch.isfinite(torch.as_tensor(total))):
            return
        for name, part in parts.items():
            is_bad_T = ~part.flatten(1).isfinite().all(dim=1)
            if bool(is_bad_T.any()):
                raise ContractError(
                    f"layer {layer}: the indexer's {name} of packed token {int(is_bad_T.nonzero()[0])} is not "
                    f"finite, so its scores are NaN and select no keys. The weights are damaged or the "
                    f"training has diverged: go back to an earlier checkpoint and lower the learning rate"
                )

    def _normed(self, key: Tensor) -> Tensor:
        norm = self.k_norm
        if not torch.is_grad_enabled() and native_for(key, norm.weight):
            return native_rows.layer_norm(key, norm.weight, norm.bias, norm.eps)
        normed: Tensor = norm(key)
        return normed

    def select(
        self, rows: IndexerRows, table_Ri: Float[Tensor, "R i"], step: Pass
    ) -> Int[Tensor, "N S"]:
        """Return the table rows each query attends to, by ascending position, -1 last."""
        return select_rows(
            rows,
            table_Ri,
            step.plan,
            num_selected=self._num_selected,
            backend=step.backend,
            flat_runs=step.flat_runs,
            key_lists=step.key_lists,
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
            # Again in backward, or the gathered keys and scores of all queries would be kept until then.
            total = total + checkpoint(
                _gathered_kl,
                query[block],
                weight[block],
                rows.key,
                selected_NS[block],
                attention_LQS,
                use_reentrant=False,
                preserve_rng_state=False,
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
