"""What supervised stages learn from documents: the losses of a step and their gradients, as sums."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from longarc.config.training import ActivationConfig
from longarc.errors import ContractError
from longarc.models.activations import Activations
from longarc.models.decoder_base import Decoder, ForwardOutput
from longarc.models.projection import token_logprobs
from longarc.trainer.draft_objective import DraftObjective, DraftSums
from longarc.trainer.freeze import is_indexer, is_mtp, train_only
from longarc.trainer.gradients import sum_counts
from longarc.trainer.packing import Document, MicroBatch, pack_shared

Mode: TypeAlias = Literal["lm", "indexer_warmup", "mtp"]
"""lm trains the next token, and drafts along where they have an objective; indexer_warmup only the indexer,
towards dense attention; mtp only the drafts."""


@dataclass(slots=True)
class LossSums:
    """What a step adds up over its micro-batches; plain numbers, so that it can cross processes."""

    lm_loss: float = 0.0
    num_targets: int = 0
    indexer_loss: float = 0.0
    num_indexer_terms: int = 0
    expert_counts: npt.NDArray[np.float64] | None = None
    """Tokens routed to each expert [moe_layers, experts]; None before the first micro-batch."""
    drafts: DraftSums | None = None
    """None where no drafts are trained, and before the first micro-batch."""

    def add(self, other: "LossSums") -> None:
        """Add the sums of other documents of the step."""
        self.lm_loss += other.lm_loss
        self.num_targets += other.num_targets
        self.indexer_loss += other.indexer_loss
        self.num_indexer_terms += other.num_indexer_terms
        self.expert_counts = sum_counts(self.expert_counts, other.expert_counts)
        if self.drafts is None:
            self.drafts = other.drafts
        elif other.drafts is not None:
            self.drafts.add(other.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedObjective:
    """What is learned from documents, and by which parameters."""

    micro_batch_tokens: int
    """Tokens in one forward and backward [tokens]."""
    mode: Mode
    """What is trained."""
    attention: Literal["dense", "sparse"]
    """Which keys are attended to; the indexer warm-up is always dense."""
    trains_indexer: bool
    indexer_stride: int
    """The sparse indexer loss looks at every n-th query."""
    int4_group_size: int | None = None
    """Numbers that share a scale where routed experts are trained as INT4; None trains without rounding."""
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward; memory, not results."""
    drafts: DraftObjective | None = None
    """How the MTP layer is trained; None leaves it alone."""

    def select_parameters(self, model: Decoder) -> None:
        """Let exactly the parameters that are trained require a gradient."""
        train_only(model, self._is_trained)

    def _is_trained(self, name: str) -> bool:
        if is_mtp(name):
            drafts = self.drafts
            return drafts is not None and (drafts.trains_indexer or not is_indexer(name))
        return self.trains_indexer if is_indexer(name) else self.mode == "lm"

    def add_gradients(self, model: Decoder, documents: Sequence[Document], step: int) -> LossSums:
        """Add the gradients of all documents, which are of sums and not of means, to ``.grad``.

        Raises:
            ContractError: a loss is not finite.
            ConfigError: a document is longer than ``micro_batch_tokens``.
        """
        sums = LossSums()
        with Activations(self.activations) as activations:
            for micro_batch in pack_shared(documents, micro_batch_tokens=self.micro_batch_tokens):
                sums.add(_add_micro_batch(model, self, micro_batch, activations, step))
        return sums


def _add_micro_batch(
    model: Decoder,
    objective: SupervisedObjective,
    micro_batch: MicroBatch,
    activations: Activations,
    step: int,
) -> LossSums:
    is_warmup = objective.mode == "indexer_warmup"
    attention = "dense" if is_warmup else objective.attention
    with torch.set_grad_enabled(objective.mode != "mtp"):
        output: ForwardOutput = model(
            micro_batch.token_ids,
            micro_batch.layout,
            attention=attention,
            indexer_loss="warmup"
            if is_warmup
            else "sparse"
            if objective.trains_indexer
            else "none",
            indexer_stride=objective.indexer_stride,
            int4_group_size=objective.int4_group_size,
            activations=activations,
        )
    total = output.indexer_loss_sum
    sums = LossSums(
        num_targets=len(micro_batch.target_ids),
        indexer_loss=output.indexer_loss_sum.item(),
        num_indexer_terms=output.num_indexer_terms,
        expert_counts=output.expert_counts.numpy().astype(np.float64),
    )
    if objective.mode == "lm":
        logprobs, _ = token_logprobs(
            output.hidden[micro_batch.source_rows],
            model.output_weight,
            micro_batch.target_ids,
            compute_dtype=model.compute_dtype,
        )
        lm_loss_sum = -logprobs.sum()
        sums.lm_loss = lm_loss_sum.item()
        total = total + lm_loss_sum
    if objective.drafts is not None:
        draft_loss_sum, sums.drafts = objective.drafts.terms(
            model,
            output.hidden,
            micro_batch,
            step=step,
            is_sparse=attention == "sparse",
            indexer_stride=objective.indexer_stride,
            int4_group_size=objective.int4_group_size,
        )
        total = total + draft_loss_sum
    if not math.isfinite(total.item()):
        raise ContractError(
            f"the loss of step {step} is {total.item()}; the weights are unchanged. Lower the learning "
            f"rate, or look for damaged weights"
        )
    if total.requires_grad:  # not where no sequence is long enough for a draft
        total.backward()  # type: ignore[no-untyped-call]
    return sums
