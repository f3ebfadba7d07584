"""What a critic learns from: the squared error of its values, and gradients, as sums. It is also read through here.

::

    documents -> packed micro-batches -> V of trained tokens -> (clipped value loss -> gradients)
                                             |
                                             +---- one row per token -----> CriticSums

The value of a token is that of the state it was sampled in, which is the row before it (``longarc.models.critic``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longarc.algos.value_loss import clipped_value_loss
from longarc.config.training import ActivationConfig
from longarc.errors import ContractError
from longarc.models.activations import Activations
from longarc.models.critic import VALUE_HEAD, Critic
from longarc.trainer.freeze import is_feed_forward, is_indexer, train_only
from longarc.trainer.packing import Document, MicroBatch, pack_shared

Column: TypeAlias = npt.NDArray[np.float64]

TrainedPart: TypeAlias = Literal["feed_forward", "all"]
"""Which of a critic's parameters are trained beside the value head: projections of feed-forward layers, or everything
but indexers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the values of one segment should have been. Columns are aligned with the segment's tokens."""

    returns: Column
    """Target of each trained token."""
    old_values: Column
    """V of each trained token at the start of the step."""
    token_weight: float
    """Of every token, in sum and normaliser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticDocument(Document):
    """A segment whose trained tokens are valued."""

    index: int
    """Place among the segments of the step."""
    trajectory_id: str
    segment_order: int
    lesson: Lesson | None = None
    """None only asks for the values, and leaves no gradient."""


@dataclass(slots=True)
class CriticSums:
    """What a step adds up over its micro-batches; plain numbers, so that it can cross processes."""

    loss: float = 0.0
    normaliser: float = 0.0
    num_clipped: float = 0.0
    """Tokens without a gradient because their value had moved far enough."""
    columns: dict[str, list[Column]] = field(default_factory=dict)
    """Of each trained token: index of its document, position, value."""

    def add(self, other: "CriticSums") -> None:
        """Add the sums and append the rows of other documents of the step."""
        self.loss += other.loss
        self.normaliser += other.normaliser
        self.num_clipped += other.num_clipped
        for name, pieces in other.columns.items():
            self.columns.setdefault(name, []).extend(pieces)

    def values_of(self, lengths: Sequence[int]) -> list[Column]:
        """Return for each document one number per token, 0 where none was valued.

        Args:
            lengths: tokens of each document, by its index [tokens].
        """
        tables = [np.zeros(length) for length in lengths]
        for document, position, value in zip(
            *(self.columns.get(name, []) for name in ("document", "position", "value")), strict=True
        ):
            for index in np.unique(document):
                own = document == index
                tables[int(index)][position[own].astype(np.int64)] = value[own]
        return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticObjective:
    """How a critic learns."""

    micro_batch_tokens: int
    """Tokens in one forward and backward [tokens]."""
    attention: Literal["dense", "sparse"]
    """Which keys are attended to; what the policy does."""
    trains: TrainedPart
    clip: float | None
    """How far a value may move from the one at the start of the step; None is without limit."""
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward; memory, not results."""

    def select_parameters(self, model: Critic) -> None:
        """Let the value head and the chosen part of the backbone require gradients.

        Source: SAO (arXiv:2607.07508) freezes the critic's attention and trains the projections of its experts.

        Raises:
            ContractError: the backbone has no feed-forward layers that are known as such.
        """
        if self.trains == "all":
            train_only(model, lambda name: not is_indexer(name))
            return
        if not any(is_feed_forward(name) for name, _ in model.named_parameters()):
            raise ContractError(
                f"no parameter of this {model.config.family} model is known as a projection of a feed-forward layer, so "
                f'the critic would train its value head alone; set critic.trains = "all"'
            )
        train_only(model, lambda name: is_feed_forward(name) or name.startswith(VALUE_HEAD + "."))

    def add_gradients(
        self, model: Critic, documents: Sequence[CriticDocument], step: int
    ) -> CriticSums:
        """Value the trained tokens of all documents, and add the gradients of those with a lesson to ``.grad``.

        Raises:
            ContractError: a value or a target is not finite; the message names the trajectory.
            ConfigError: a segment is longer than ``micro_batch_tokens``.
        """
        sums = CriticSums()
        ordered = sorted(documents, key=lambda document: document.index)
        with Activations(self.activations) as activations:
            for own in (
                [document for document in ordered if document.lesson is None],
                [document for document in ordered if document.lesson is not None],
            ):
                for micro_batch in pack_shared(own, micro_batch_tokens=self.micro_batch_tokens):
                    sums.add(self._add_micro_batch(model, own, micro_batch, activations))
        return sums

    def _add_micro_batch(
        self,
        model: Critic,
        documents: Sequence[CriticDocument],
        micro_batch: MicroBatch,
        activations: Activations,
    ) -> CriticSums:
        learns = documents[0].lesson is not None
        with torch.set_grad_enabled(learns):
            values: Tensor = model(
                micro_batch.token_ids,
                micro_batch.layout,
                micro_batch.source_rows,
                attention=self.attention,
                activations=activations,
            )
        _refuse_non_finite("value", values, documents, micro_batch)
        order = torch.tensor([document.index for document in documents])
        columns = {
            "document": order[micro_batch.sequence_indices],
            "position": micro_batch.positions,
            "value": values,
        }
        sums = CriticSums(columns={n: [_column(numbers)] for n, numbers in columns.items()})
        if learns:
            given = _lessons(documents, micro_batch, values)
            _refuse_non_finite("return", given["returns"], documents, micro_batch)
            loss = clipped_value_loss(
                values,
                given["old_values"],
                given["returns"],
                torch.ones_like(values, dtype=torch.bool),
                clip=self.clip,
                token_weights=given["weights"],
            )
            loss.loss_sum.backward()  # type: ignore[no-untyped-call]
            sums.loss, sums.normaliser = loss.loss_sum.item(), loss.normaliser.item()
            sums.num_clipped = loss.num_rejected.item()
        return sums


def _lessons(
    documents: Sequence[CriticDocument], micro_batch: MicroBatch, like: Tensor
) -> Mapping[str, Tensor]:
    """Return targets, old values and weights, one per row of the micro-batch."""
    returns, old_values, weights = [], [], []
    for index, position in zip(
        micro_batch.sequence_indices.tolist(), micro_batch.positions.tolist(), strict=True
    ):
        lesson = documents[index].lesson
        assert lesson is not None
        returns.append(lesson.returns[position])
        old_values.append(lesson.old_values[position])
        weights.append(lesson.token_weight)
    return {
        "returns": like.new_tensor(returns),
        "old_values": like.new_tensor(old_values),
        "weights": like.new_tensor(weights),
    }


def _refuse_non_finite(
    what: str, numbers: Tensor, documents: Sequence[CriticDocument], micro_batch: MicroBatch
) -> None:
    bad = (~numbers.detach().isfinite()).nonzero()
    if not len(bad):
        return
    row = int(bad[0])
    document = documents[int(micro_batch.sequence_indices[row])]
    raise ContractError(
        f"trajectory {document.trajectory_id}: the critic's {what} of token {int(micro_batch.positions[row])} in "
        f"segment {document.segment_order} is {numbers[row].item()}; the policy's weights are unchanged. Lower the "
        f"critic's learning rate, or look for damaged weights or rewards"
    )


def _column(numbers: Tensor) -> Column:
    column: Column = numbers.detach().to(torch.float64).numpy()
    return column
