"""What the depths of multi-token prediction learn from documents: their losses, and how good the drafts are.

Each target of the main loss is a target of every depth whose draft reaches it, and of no other token: what is
masked is not drafted, and a chain of drafts ends where the trained tokens do.

Shape letters: G draft depths, M targets.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.mtp import chained, end_to_end_tv, expected_accepted, single_step_tv
from longarc.config.stages import MtpLoss
from longarc.errors import ContractError
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Decoder
from longarc.models.mtp_losses import draft_scores
from longarc.records.metric import Metric
from longarc.trainer.packing import MicroBatch

Column = npt.NDArray[np.float64]


@dataclass(slots=True)
class DraftSums:
    """What a step adds up over its drafts; plain numbers, so that it can cross processes."""

    loss: float
    """Of the drafts, without its weight."""
    nll: Column
    """-log q [nats] of the text, by depth."""
    acceptance: Column
    """Probability that the main model accepts a draft after all before it, by depth."""
    num_drafts: Column
    """Drafts that have a target, by depth."""
    num_accepted: float
    """Expected accepted drafts of the whole chains [tokens]."""
    num_chains: int
    """Chains of drafts, one of each depth, that no end of a document or of what is trained cuts short."""
    indexer_loss: float
    num_indexer_terms: int
    expert_counts: Column
    """Drafts routed to each expert."""

    def add(self, other: "DraftSums") -> None:
        """Add the sums of other documents of the step."""
        self.loss += other.loss
        self.nll = self.nll + other.nll
        self.acceptance = self.acceptance + other.acceptance
        self.num_drafts = self.num_drafts + other.num_drafts
        self.num_accepted += other.num_accepted
        self.num_chains += other.num_chains
        self.indexer_loss += other.indexer_loss
        self.num_indexer_terms += other.num_indexer_terms
        self.expert_counts = self.expert_counts + other.expert_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftObjective:
    """How the drafts are trained."""

    loss: MtpLoss
    weight: float = 1.0
    """Factor on the loss."""
    trains_trunk: bool = False
    """Whether gradients reach the main model, its embedding and its output projection."""
    trains_indexer: bool = False
    """Whether the layer's own indexer learns, from its attention at the first depth."""
    cross_entropy_steps: int = 0
    """Steps that learn from cross-entropy before ``loss`` takes over [optimizer steps]."""

    def loss_of(self, step: int) -> MtpLoss:
        """Return the loss of a 0-based step."""
        return "cross_entropy" if step < self.cross_entropy_steps else self.loss

    def terms(
        self,
        model: Decoder,
        hidden: Float[Tensor, "tokens hidden"],
        micro_batch: MicroBatch,
        *,
        step: int,
        is_sparse: bool,
        indexer_stride: int = 1,
        int4_group_size: int | None = None,
    ) -> tuple[Float[Tensor, ""], DraftSums]:
        """Return what is to be minimised, as a sum over targets, and what was added up.

        Args:
            model: has an MTP layer.
            hidden: of the main model for this micro-batch.
            micro_batch: what is learned from.
            step: 0-based; chooses the loss.
            is_sparse: how the main model attended.
            indexer_stride: the indexer's loss looks at every n-th draft.
            int4_group_size: as in the main model.

        Raises:
            ContractError: the model has no MTP layer.
        """
        if not isinstance(model, GlmMoeDsa):
            raise ContractError(
                f"a {model.config.family} model has no MTP layer to train; leave the drafts out"
            )
        output = model.drafts(
            hidden,
            micro_batch.token_ids,
            micro_batch.layout,
            attention="sparse" if is_sparse else "dense",
            trains_trunk=self.trains_trunk,
            with_indexer_loss=self.trains_indexer,
            indexer_stride=indexer_stride,
            int4_group_size=int4_group_size,
        )
        weight = model.output_weight
        sources = micro_batch.source_rows
        logprobs_GM, alpha_GM = draft_scores(
            output.hidden[:, sources],
            hidden.detach()[sources],
            weight if self.trains_trunk else weight.detach(),
            micro_batch.target_ids,
        )
        is_draft_GM = output.has_draft[:, sources]
        is_chained_GM = chained(is_draft_GM, fill=False) & _follows(micro_batch, len(is_draft_GM))
        chain_alpha_GM = chained(alpha_GM, fill=0.0)
        nll_GM = -logprobs_GM.masked_fill(~is_draft_GM, 0.0)
        loss = _loss(
            self.loss_of(step), nll_GM, alpha_GM, is_draft_GM, chain_alpha_GM, is_chained_GM
        )
        is_whole_M = is_chained_GM.all(dim=0)
        accepted_M = expected_accepted(chain_alpha_GM.detach(), is_chained_GM)
        sums = DraftSums(
            loss=loss.item(),
            nll=_by_depth(nll_GM),
            acceptance=_by_depth(alpha_GM.masked_fill(~is_draft_GM, 0.0)),
            num_drafts=_by_depth(is_draft_GM),
            num_accepted=accepted_M.masked_fill(~is_whole_M, 0.0).double().sum().item(),
            num_chains=int(is_whole_M.sum()),
            indexer_loss=output.indexer_loss_sum.item(),
            num_indexer_terms=output.num_indexer_terms,
            expert_counts=output.expert_counts.double().numpy(),
        )
        return self.weight * loss + output.indexer_loss_sum, sums


def _loss(
    name: MtpLoss,
    nll_GM: Tensor,
    alpha_GM: Tensor,
    is_draft_GM: Tensor,
    chain_alpha_GM: Tensor,
    is_chained_GM: Tensor,
) -> Tensor:
    """Sum a loss over the targets; the depths count alike and add up to one."""
    match name:
        case "cross_entropy":
            return nll_GM.sum() / len(nll_GM)
        case "single_step_tv":
            return single_step_tv(alpha_GM, is_draft_GM).sum() / len(alpha_GM)
        case "end_to_end_tv":
            return end_to_end_tv(chain_alpha_GM, is_chained_GM).sum()


def _follows(micro_batch: MicroBatch, num_depths: int) -> Bool[Tensor, "G M"]:
    """Say whether the target g behind target m is the token g behind it in the same sequence."""
    sequence_GM = chained(micro_batch.sequence_indices.expand(num_depths, -1), fill=-1)
    position_GM = chained(micro_batch.positions.expand(num_depths, -1), fill=-1)
    step_G1 = torch.arange(num_depths)[:, None]
    same: Bool[Tensor, "G M"] = sequence_GM == sequence_GM[:1]
    return same & (position_GM == position_GM[:1] + step_G1)


def _by_depth(values_GM: Float[Tensor, "G M"] | Bool[Tensor, "G M"] | Int[Tensor, "G M"]) -> Column:
    column: Column = values_GM.detach().double().sum(dim=1).numpy()
    return column


def draft_metrics(sums: DraftSums, *, num_targets: int) -> list[Metric]:
    """Return what a step observed: losses and acceptance of each depth, and how many tokens a draft is worth."""
    metrics = [Metric("loss/mtp", sums.loss, num_targets)]
    depths = zip(sums.nll, sums.acceptance, sums.num_drafts, strict=True)
    for depth, (nll, acceptance, count) in enumerate(depths, start=1):
        metrics += [
            Metric(f"loss/mtp_nats/depth_{depth}", float(nll), float(count)),
            Metric(f"mtp/acceptance_frac/depth_{depth}", float(acceptance), float(count)),
        ]
    metrics.append(
        # The token that the main model adds itself counts too.
        Metric("mtp/accept_length_tokens", sums.num_accepted + sums.num_chains, sums.num_chains)
    )
    if sums.num_indexer_terms:
        metrics.append(
            Metric("loss/mtp_indexer_kl_nats", sums.indexer_loss, sums.num_indexer_terms)
        )
    share = sums.expert_counts.max() / max(sums.expert_counts.mean(), 1e-9)
    metrics.append(Metric("router/mtp_max_load", float(share), reduce="max"))
    return metrics
