"""Multi-token prediction (MTP): one more decoder layer, which drafts the tokens behind the next one.

::

    h_i       state of the main model after the final norm: predicts token i + 1
    z_i^d   = W_eh [ enorm(Emb(t_{i+d})) , hnorm(h_i^{d-1}) ]          h_i^0 = h_i
    h_i^d   = norm(layer(z_i^d))                                        predicts token i + d + 1

All depths share the layer, and embedding and output projection are the main model's. Depth 1 runs the layer
as any other: it leaves latent rows and selects keys. The later depths ask new questions of those rows and of
that selection, so the keys of drafts come from states of the main model alone, in training and in inference.

Source: GLM-5 (arXiv:2602.15763), section 2.1; GLM-5.2, shared index and KV; DeepSeek-V3 (arXiv:2412.19437),
section 2.2. Names are those of published checkpoints below ``model.layers.N``, N = num_hidden_layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longarc.config.model import GlmMoeDsaConfig
from longarc.models.attention import dense_attention
from longarc.models.decoder_base import Attention, Pass, with_padding
from longarc.models.draft_rows import DraftRows, draft_rows
from longarc.models.indexer import Indexer
from longarc.models.kernels import attention as native_attention
from longarc.models.kernels.native import native_for
from longarc.models.layers import Linear, RMSNorm, Rotation, pad_rows, padded_rows
from longarc.models.layout import Layout
from longarc.models.mla import SparseLatentAttention, per_head
from longarc.models.moe import MixtureOfExperts
from longarc.models.plan import AttentionPlan
from longarc.models.sparse_attention import backend_for, sparse_attention

RotationOf = Callable[[Int[Tensor, " rows"]], Rotation]
"""Gives the rotation of rows at these positions: the main model's."""


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """What the first depth leaves for the later ones."""

    latent: Float[Tensor, "table width"]
    selected: Int[Tensor, "drafts S"] | None
    """Rows of the table that each draft attends to; None where attention is dense."""

    def at(self, drafts: Int[Tensor, " later"]) -> "DraftKeys":
        """Return the same rows, with the selections of these drafts of depth 1."""
        return DraftKeys(self.latent, None if self.selected is None else self.selected[drafts])


class DraftAttention(SparseLatentAttention):
    """MLA whose later depths attend to the keys of the first."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__(config, 0)  # as layer 0 it has an indexer of its own
        # In a cache its rows lie behind those of the last layer.
        self._layer = config.num_hidden_layers

    def leave_keys(self, x: Float[Tensor, "T hidden"], step: Pass) -> None:
        """Write the rows of depth 1 into the cache and compute nothing else."""
        n = step.num_tokens
        step.table("latent", self._layer, self._latent_rows(x, step)[:n])
        if step.attention == "sparse" and self.indexer is not None:
            q_latent = self.q_a_layernorm(self.q_a_proj(x))
            rows = self.indexer.project(x, q_latent, step.rotation)
            step.table("index_keys", self._layer, rows.key[:n])

    def attend_first(
        self, x: Float[Tensor, "T hidden"], step: Pass
    ) -> tuple[Float[Tensor, "T hidden"], DraftKeys, Float[Tensor, ""] | None]:
        """Return the output of depth 1, its keys, and where asked for the indexer's loss summed over drafts."""
        n = step.num_tokens
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        latent = step.table("latent", self._layer, self._latent_rows(x, step)[:n])
        if step.attention == "dense" or self.indexer is None:  # a hybrid has no indexers
            keys = DraftKeys(latent, None)
            return self._attend(x, q_latent, keys, step)[0], keys, None
        selection = self._select(self.indexer, x, q_latent, step)
        keys = DraftKeys(latent, selection.rows)
        output, mass_NS = self._attend(x, q_latent, keys, step)
        if selection.indexer_rows is None or mass_NS is None or keys.selected is None:
            return output, keys, None
        loss = Indexer.sparse_loss(
            selection.indexer_rows, keys.selected, [mass_NS], stride=step.indexer_stride
        )
        return output, keys, loss

    def attend_later(
        self, x: Float[Tensor, "T hidden"], step: Pass, keys: DraftKeys
    ) -> Float[Tensor, "T hidden"]:
        """Return the output of a later depth."""
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        return self._attend(x, q_latent, keys, step)[0]

    def _attend(
        self, x: Tensor, q_latent: Tensor, keys: DraftKeys, step: Pass
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the keys and project; also return the probabilities summed over heads if they are needed."""
        w_k_npc, w_v_nvc = torch.split(
            self.kv_b_proj.weight.view(self._num_heads, -1, self._latent),
            [self._nope, self._value],
            dim=1,
        )
        query_Nnd = self._absorbed_query(q_latent, w_k_npc, step)[: step.num_tokens]
        attended_Nnc, mass_NS = self._attended(query_Nnd, keys, step)
        value_Tnv = per_head(with_padding(attended_Nnc, x), w_v_nvc)
        output: Tensor = self.o_proj(value_Tnv.flatten(1))
        return output, mass_NS

    def _attended(
        self, query_Nnd: Tensor, keys: DraftKeys, step: Pass
    ) -> tuple[Tensor, Tensor | None]:
        width, scale, runs = self._latent, self._scale, step.flat_runs
        if keys.selected is not None:
            return sparse_attention(
                query_Nnd,
                keys.latent,
                keys.selected,
                value_width=width,
                scale=scale,
                backend=step.backend,
                flat_runs=runs,
                with_mass=step.indexer_loss != "none",
            )
        key_R1d = keys.latent[:, None]
        if runs is not None:
            attended = native_attention.dense_attention(
                runs, query_Nnd, key_R1d, None, value_width=width, scale=scale
            )
            return attended, None
        attended = dense_attention(query_Nnd, key_R1d, key_R1d, step.plan, scale=scale)
        return attended[..., :width], None


class SharedHead(nn.Module):
    """The norm before the main model's output projection."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthOutput:
    """What one depth computes."""

    hidden: Float[Tensor, "drafts hidden"]
    """After ``shared_head.norm``: what is projected to the vocabulary."""
    fed: Float[Tensor, "drafts hidden"]
    """What the next depth goes on from."""
    keys: DraftKeys
    expert_counts: Int[Tensor, " experts"]
    indexer_loss_sum: Float[Tensor, ""] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """What all depths compute for a packed layout. Row r of depth d predicts the token behind row r."""

    hidden: Float[Tensor, "depths tokens hidden"]
    """After ``shared_head.norm``; 0 where there is no draft."""
    has_draft: Bool[Tensor, "depths tokens"]
    """Whether row r is far enough from the beginning of its sequence: position >= depth, counted from 1."""
    indexer_loss_sum: Float[Tensor, ""]
    """KL [nats] of the layer's own indexer against its attention at depth 1; carries gradient."""
    num_indexer_terms: int
    """Terms of that sum."""
    expert_counts: Int[Tensor, " experts"]
    """Drafts routed to each expert, all depths together."""


class MultiTokenPredictor(nn.Module):
    """The layer behind the last one; see the module."""

    def __init__(self, config: GlmMoeDsaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self._num_depths = config.mtp_num_depths
        self._feeds_normed = config.mtp_feeds_normed
        self._advances = config.mtp_query_position == "advance"
        self._num_experts = config.n_routed_experts
        self.enorm = RMSNorm(width, eps=eps)
        self.hnorm = RMSNorm(width, eps=eps)
        self.eh_proj = Linear(2 * width, width)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = MixtureOfExperts(config)
        self.shared_head = SharedHead(config)

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        token_ids: Int[Tensor, " tokens"],
        layout: Layout,
        *,
        embedding: Float[Tensor, "vocab hidden"],
        rotation_of: RotationOf,
        attention: Attention,
        with_indexer_loss: bool = False,
        indexer_stride: int = 1,
        int4_group_size: int | None = None,
    ) -> DraftOutput:
        """Compute the drafts of all depths of a packed layout, each from the tokens of the text.

        Args:
            hidden: of the main model, after the final norm; carries gradient.
            token_ids: of the pack.
            layout: which tokens belong to one sequence.
            embedding: the main model's; carries gradient.
            rotation_of: the main model's.
            attention: as in the main model.
            with_indexer_loss: also compute the loss of the layer's own indexer; needs sparse attention.
            indexer_stride: how many drafts there are for each one that this loss looks at.
            int4_group_size: as in the main model.
        """
        depths = draft_rows(layout, num_depths=self._num_depths, device=hidden.device)
        place_GN = hidden.new_zeros(self._num_depths, len(hidden), dtype=torch.bool)
        outputs: list[Tensor] = []
        counts = torch.zeros(self._num_experts, dtype=torch.long, device=hidden.device)
        loss, state, keys = hidden.new_zeros(()), hidden, None
        for depth, drafts in enumerate(depths, start=1):
            place_GN[depth - 1, drafts.rows] = True
            step = replace(
                self.step_of(depth, drafts.positions, drafts.plan, rotation_of, attention),
                indexer_loss="sparse" if with_indexer_loss and depth == 1 else "none",
                indexer_stride=indexer_stride,
                int4_group_size=int4_group_size,
            )
            output = self.depth(
                self.embedded(token_ids[drafts.rows], embedding, drafts.positions, depth),
                state[drafts.before],
                step,
                None if keys is None else keys.at(drafts.first),
            )
            keys = output.keys if keys is None else keys
            outputs.append(_on_rows(output.hidden, drafts, hidden))
            state = outputs[-1] if self._feeds_normed else _on_rows(output.fed, drafts, hidden)
            counts = counts + output.expert_counts
            if output.indexer_loss_sum is not None:
                loss = output.indexer_loss_sum
        outputs += [torch.zeros_like(hidden)] * (self._num_depths - len(outputs))
        num_first = len(depths[0].rows) if depths and with_indexer_loss else 0
        return DraftOutput(
            hidden=torch.stack(outputs),
            has_draft=place_GN,
            indexer_loss_sum=loss,
            num_indexer_terms=len(range(0, num_first, indexer_stride)),
            expert_counts=counts,
        )

    def depth(
        self,
        embedded: Float[Tensor, "drafts hidden"],
        before: Float[Tensor, "drafts hidden"],
        step: Pass,
        keys: DraftKeys | None,
    ) -> DepthOutput:
        """Compute one depth.

        Args:
            embedded: of the token that each draft reads.
            before: what the depth before, or the main model, hands on.
            step: where the drafts stand and which rows of the table they may attend to.
            keys: of the first depth, which attends to its own; None in the first depth.
        """
        hidden = self._joined(embedded, before)
        normed, loss = self.input_layernorm(hidden), None
        if keys is None:
            attended, keys, loss = self.self_attn.attend_first(normed, step)
        else:
            attended = self.self_attn.attend_later(normed, step, keys)
        hidden = hidden + attended
        mixed, counts = self.mlp(
            self.post_attention_layernorm(hidden),
            step.num_tokens,
            int4_group_size=step.int4_group_size,
        )
        hidden = hidden + mixed
        normed = self.shared_head.norm(hidden)[: len(embedded)]
        return DepthOutput(
            hidden=normed,
            fed=normed if self._feeds_normed else hidden[: len(embedded)],
            keys=keys,
            expert_counts=counts,
            indexer_loss_sum=loss,
        )

    def leave_keys(
        self,
        embedded: Float[Tensor, "drafts hidden"],
        before: Float[Tensor, "drafts hidden"],
        step: Pass,
    ) -> None:
        """Write the rows that depth 1 leaves in the cache, and compute no draft.

        Args:
            embedded: of the token that each draft reads.
            before: the main model's state before it.
            step: of depth 1, with the cache.
        """
        self.self_attn.leave_keys(self.input_layernorm(self._joined(embedded, before)), step)

    def _joined(self, embedded: Tensor, before: Tensor) -> Tensor:
        num_rows = padded_rows(len(embedded))
        both = [self.enorm(pad_rows(embedded, num_rows)), self.hnorm(pad_rows(before, num_rows))]
        joined: Tensor = self.eh_proj(torch.cat(both, dim=-1))
        return joined

    def embedded(
        self,
        token_ids: Int[Tensor, " drafts"],
        embedding: Float[Tensor, "vocab hidden"],
        positions: Int[Tensor, " drafts"],
        depth: int,
    ) -> Float[Tensor, "drafts hidden"]:
        """Look up the tokens; what the first depth reads at position 0 counts as 0, as engines have it."""
        rows = F.embedding(token_ids, embedding)
        return rows.masked_fill((positions == 0)[:, None], 0.0) if depth == 1 else rows

    def step_of(
        self,
        depth: int,
        positions: Int[Tensor, " drafts"],
        plan: AttentionPlan,
        rotation_of: RotationOf,
        attention: Attention,
    ) -> Pass:
        """Return the pass of a depth over drafts that go back to these positions."""
        place = positions + (depth - 1) if self._advances else positions
        return Pass(
            rotation=rotation_of(pad_rows(place, padded_rows(len(place)))),
            num_tokens=len(positions),
            plan=plan,
            backend=backend_for(self.eh_proj.weight),
            flat_runs=plan.flat_runs() if native_for(self.eh_proj.weight) else None,
            attention=attention,
        )


def _on_rows(values: Tensor, drafts: DraftRows, like: Tensor) -> Tensor:
    """Bring the drafts' values to the rows of the pack, 0 elsewhere."""
    return torch.zeros_like(like).index_copy(0, drafts.rows, values)
