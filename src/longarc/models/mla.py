"""Multi-head latent attention (MLA) with sparse key selection, in absorbed form.

The key-value projection is folded into query and output, so that attention runs on the latent rows
themselves: one form in training and inference, one key head, and a small cache.

::

    q~[h] = [ q_nope[h] W_k[h] , rope(q_rope[h]) ]      key = [ c , rope(k_rope) ]      value = c
    out   = concat_h( softmax(scale q~[h] . key) c W_v[h]^T ) W_o^T

Source: DeepSeek-V2, arXiv:2405.04434; GLM-5, arXiv:2602.15763, section 3. Shape letters: T padded
rows, N tokens, n heads, c latent width, r rotated width, p unrotated width, v value width.
"""

from dataclasses import replace
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longarc.config.index_share import layers_served
from longarc.config.model import GlmMoeDsaConfig
from longarc.errors import ContractError
from longarc.models.attention import dense_attention
from longarc.models.decoder_base import Pass, with_padding
from longarc.models.indexer import SCORED_FLOATS, Indexer
from longarc.models.kernels import attention as native_attention
from longarc.models.kernels import rows as native_rows
from longarc.models.kernels.native import native_for
from longarc.models.key_selection import IndexerRows
from longarc.models.layers import Linear, RMSNorm
from longarc.models.rope import latent_softmax_scale
from longarc.models.selection import Selection
from longarc.models.sparse_attention import sparse_attention


class SparseLatentAttention(nn.Module):
    """MLA over keys that its indexer selects or, without one, that of a layer before it."""

    indexer: Indexer | None

    def __init__(self, config: GlmMoeDsaConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._served = layers_served(config.indexer_kinds, layer)
        self._num_heads = config.num_attention_heads
        self._nope, self._rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._latent, self._value = config.kv_lora_rank, config.v_head_dim
        self._scale = latent_softmax_scale(self._nope + self._rope, config.rope_scaling)
        latent_eps = (
            config.rms_norm_eps if config.latent_norm_eps is None else config.latent_norm_eps
        )
        hidden, heads = config.hidden_size, self._num_heads
        self.q_a_proj = Linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=latent_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * (self._nope + self._rope))
        self.kv_a_proj_with_mqa = Linear(hidden, self._latent + self._rope)
        self.kv_a_layernorm = RMSNorm(self._latent, eps=latent_eps)
        self.kv_b_proj = Linear(self._latent, heads * (self._nope + self._value))
        self.o_proj = Linear(heads * self._value, hidden)
        self.indexer = Indexer(config) if layer == self._served.start else None

    def forward(
        self, x: Float[Tensor, "T hidden"], step: Pass, selection: Selection | None = None
    ) -> tuple[Float[Tensor, "T hidden"], Float[Tensor, ""] | None, Selection | None]:
        """Attend.

        Args:
            x: normed residual stream.
            step: what all layers share.
            selection: what the layer before handed over; not read where there is an indexer.

        Returns:
            The output; where asked for, the indexer's loss summed over tokens; and the selection for the next
            layer, None where that has its own.

        Raises:
            ContractError: a selection is needed and was not given.
        """
        num_tokens = step.num_tokens
        w_k_npc, w_v_nvc = torch.split(
            self.kv_b_proj.weight.view(self._num_heads, -1, self._latent),
            [self._nope, self._value],
            dim=1,
        )
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        query_Tnd = self._absorbed_query(q_latent, w_k_npc, step)
        latent = step.table("latent", self._layer, self._latent_rows(x, step)[:num_tokens])

        query_Nnd = query_Tnd[:num_tokens]
        if self.indexer is not None:
            selection = self._select(self.indexer, x, q_latent, step)
        elif selection is None:
            raise ContractError(
                f"layer {self._layer} reuses the selection of layer {self._served.start}, which was not handed to "
                f"it; run the layers in order, and begin with one that has an indexer"
            )
        if step.attention == "dense":
            attended_Nnc, loss = self._dense(query_Nnd, latent, selection, step)
        else:
            attended_Nnc, loss, selection = self._sparse(query_Nnd, latent, selection, step)
        value_Tnv = per_head(with_padding(attended_Nnc, x), w_v_nvc)
        # The last layer of a selection lets go of it; another one would keep it until backward.
        is_last = self._layer == self._served[-1]
        return self.o_proj(value_Tnv.flatten(1)), loss, None if is_last else selection

    def _absorbed_query(self, q_latent: Tensor, w_k_npc: Tensor, step: Pass) -> Tensor:
        nope_Tnp, rope_Tnr = (
            self.q_b_proj(q_latent)
            .unflatten(1, (self._num_heads, -1))
            .split([self._nope, self._rope], dim=-1)
        )
        absorbed_Tnc = per_head(nope_Tnp, w_k_npc.mT)
        return torch.cat([absorbed_Tnc, step.rotation.apply(rope_Tnr)], dim=-1)

    def _latent_rows(self, x: Tensor, step: Pass) -> Tensor:
        c, k_rope = self.kv_a_proj_with_mqa(x).split([self._latent, self._rope], dim=-1)
        rotated = step.rotation.apply(k_rope[:, None])[:, 0]
        return torch.cat([self.kv_a_layernorm(c), rotated], dim=-1)

    def _select(self, indexer: Indexer, x: Tensor, q_latent: Tensor, step: Pass) -> Selection:
        """Let the indexer choose; with a graph only where its loss is asked for."""
        needs_loss = step.indexer_loss != "none"
        if step.attention == "dense" and not needs_loss:
            return Selection()
        given_NS = None if step.replay is None else step.replay.keys.get(self._layer)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_loss):
            rows = indexer.project(x, q_latent, step.rotation)
            n = step.num_tokens
            rows = IndexerRows(rows.query[:n], rows.key[:n], rows.weight[:n])
        if torch.is_grad_enabled():
            # Where nothing is trained, as in an engine, a broken sequence is the caller's to find.
            indexer.check_finite(rows, self._layer)
        table = step.table("index_keys", self._layer, rows.key)
        selected_NS = None
        if step.attention == "sparse":
            selected_NS = (
                indexer.select(rows, table, step)
                if given_NS is None
                else step.plan.rows_at(given_NS.long())
            )
            if step.record is not None:
                step.record.keys[self._layer] = step.plan.positions_of(selected_NS)
        return Selection(selected_NS, rows if needs_loss else None)

    def _sparse(
        self, query_Nnd: Tensor, latent: Tensor, selection: Selection, step: Pass
    ) -> tuple[Tensor, Tensor | None, Selection]:
        selected_NS = selection.rows
        assert selected_NS is not None
        attended, attention_NS = sparse_attention(
            query_Nnd,
            latent,
            selected_NS,
            value_width=self._latent,
            scale=self._scale,
            backend=step.backend,
            flat_runs=step.flat_runs,
            with_mass=step.indexer_loss != "none",
        )
        indexer_rows = selection.indexer_rows
        if indexer_rows is None or attention_NS is None:
            return attended, None, selection
        selection = replace(selection, attention=(*selection.attention, attention_NS))
        if len(selection.attention) < len(self._served):
            return attended, None, selection
        loss = Indexer.sparse_loss(
            indexer_rows, selected_NS, selection.attention, stride=step.indexer_stride
        )
        return attended, loss, selection

    def _dense(
        self, query_Nnd: Tensor, latent: Tensor, selection: Selection, step: Pass
    ) -> tuple[Tensor, Tensor | None]:
        key_R1d = latent[:, None]
        if step.flat_runs is not None:
            attended = native_attention.dense_attention(
                step.flat_runs,
                query_Nnd,
                key_R1d,
                None,
                value_width=self._latent,
                scale=self._scale,
            )
        else:
            # The rotated dimensions ride along as values: SDPA wants keys and values of one width.
            attended = dense_attention(query_Nnd, key_R1d, key_R1d, step.plan, scale=self._scale)
            attended = attended[..., : self._latent]
        rows = selection.indexer_rows
        if rows is None:
            return attended, None
        losses = []
        blocks = chain.from_iterable(
            run.blocks(max(1, SCORED_FLOATS // (self._num_heads * run.num_keys)))
            for run in step.plan.runs
        )
        for block in blocks:
            with torch.no_grad():
                keys_Pd = latent[block.key_rows]
                score_nQP = query_Nnd[block.queries].transpose(0, 1) @ keys_Pd.mT * self._scale
                future = torch.ones_like(score_nQP[0], dtype=torch.bool).triu(
                    block.first_position + 1
                )
                attention_QP = score_nQP.masked_fill(future, float("-inf")).softmax(-1).sum(0)
            losses.append(Indexer.warmup_loss(rows, block, attention_QP))
        # Dense attention is too large to hand on, so each layer adds its own part of the mean.
        return attended, torch.stack(losses).sum() / len(self._served)


def per_head(x_Tna: Tensor, weight_nba: Tensor) -> Tensor:
    """Multiply the rows of each head by that head's matrix, [T, n, b]."""
    if native_for(x_Tna, weight_nba):
        return native_rows.head_product(x_Tna, weight_nba)
    return (x_Tna.transpose(0, 1) @ weight_nba.mT).transpose(0, 1)
