"""What RL and distillation learn from sampled tokens: the loss of a step and its gradients, as sums.

::

    documents -> packed micro-batches -> log pi of trained tokens -> PolicyLoss -> gradients
                                             |                            |
                                             +---- one row per token -----+--> PolicySums
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longarc.algos.distill import distillation_advantages
from longarc.algos.protocols import LossInputs, PolicyLoss
from longarc.algos.token_loss import TokenLoss
from longarc.config.training import ActivationConfig
from longarc.errors import ConfigError, ContractError, boundary
from longarc.models.activations import Activations
from longarc.models.decoder_base import Decoder, ForwardOutput
from longarc.models.kept_projection import scored
from longarc.models.routed_rows import RoutingShape
from longarc.models.routing import Routing
from longarc.records.sampling import RoutingReplay
from longarc.trainer.freeze import is_indexer, is_mtp, train_only
from longarc.trainer.gradients import sum_counts
from longarc.trainer.packing import Document, MicroBatch, pack_shared

Column: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDocument(Document):
    """A segment and what its trained tokens are worth."""

    index: int
    """Place among the segments of the step."""
    trajectory_id: str
    segment_order: int
    family: str
    behaviour_logprobs: Sequence[float]
    """log mu [nats] of every token, as the engine recorded it; read where a token is trained."""
    kept_ids: Sequence[Sequence[int]] | None
    """Of every token, the ids it was drawn from, empty for the whole vocabulary; None where that holds for all."""
    advantage: float
    """Of every trained token; not read where a teacher gives one per token."""
    token_weight: float
    """Of every trained token, in sum and normaliser."""


@dataclass(slots=True)
class PolicySums:
    """What a policy step adds up, and a row for each trained token; numbers that can cross processes."""

    loss: float = 0.0
    normaliser: float = 0.0
    num_rejected: float = 0.0
    num_trained_tokens: int = 0
    expert_counts: Column | None = None
    """Tokens routed to each expert [moe_layers, experts]; None before the first micro-batch."""
    columns: dict[str, list[Column]] = field(default_factory=dict)
    """Of each trained token: index of its document, position, log pi, log pi/mu, advantage, entropy [nats]."""

    def add(self, other: "PolicySums") -> None:
        """Add the sums and append the rows of other documents of the step."""
        self.loss += other.loss
        self.normaliser += other.normaliser
        self.num_rejected += other.num_rejected
        self.num_trained_tokens += other.num_trained_tokens
        self.expert_counts = sum_counts(self.expert_counts, other.expert_counts)
        for name, pieces in other.columns.items():
            self.columns.setdefault(name, []).extend(pieces)

    def column(self, name: str) -> Column:
        """Return one number per trained token."""
        pieces = self.columns.get(name)
        return np.concatenate(pieces) if pieces else np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyObjective:
    """How sampled tokens are learned from."""

    micro_batch_tokens: int
    """Tokens in one forward and backward [tokens]."""
    temperature: float
    """Of the rollouts: log-probabilities are those of the distribution that was sampled."""
    attention: Literal["dense", "sparse"]
    """What the engine used."""
    loss: PolicyLoss
    loss_settings: Mapping[str, float]
    teachers: Mapping[str, Decoder] | None
    """Frozen teacher of each family; None learns from advantages."""
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward; memory, not results."""
    routing_replay: RoutingReplay = "none"
    """What of the engine's routing the policy computes with; teachers choose for themselves."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature} has no log-probabilities to train on: greedy "
                f"rollouts are for evaluation; set a temperature above 0"
            )
        try:
            inspect.signature(self.loss).bind(None, **self.loss_settings)
        except TypeError as error:
            raise ConfigError(
                f"the loss does not take the settings {dict(self.loss_settings)}: {error}; it takes "
                f"{inspect.signature(self.loss)}"
            ) from error

    def select_parameters(self, model: Decoder) -> None:
        """Train everything but indexer (GLM-5, section 3.2) and MTP layer, and no teacher."""
        train_only(model, lambda name: not is_indexer(name) and not is_mtp(name))
        for teacher in (self.teachers or {}).values():
            train_only(teacher, lambda _: False)

    def add_gradients(
        self, model: Decoder, documents: Sequence[PolicyDocument], step: int
    ) -> PolicySums:
        """Add the gradients of the summed loss to ``.grad``.

        Raises:
            ContractError: a loss, or what goes into it, is not finite; the message names the trajectory.
            ConfigError: a segment is longer than ``micro_batch_tokens``.
        """
        sums = PolicySums()
        with Activations(self.activations) as activations:
            for teacher, own in self._by_teacher(documents):
                for micro_batch in pack_shared(own, micro_batch_tokens=self.micro_batch_tokens):
                    sums.add(self._add_micro_batch(model, teacher, own, micro_batch, activations))
        return sums

    def _by_teacher(
        self, documents: Sequence[PolicyDocument]
    ) -> list[tuple[Decoder | None, list[PolicyDocument]]]:
        """Group documents by who scores them, in the order of the batch.

        A micro-batch of several teachers would pass through all of them.
        """
        teachers = self.teachers or {}
        grouped: dict[int, tuple[Decoder | None, list[PolicyDocument]]] = {}
        for document in sorted(documents, key=lambda document: document.index):
            teacher = teachers.get(document.family)
            grouped.setdefault(id(teacher), (teacher, []))[1].append(document)
        return list(grouped.values())

    def _add_micro_batch(
        self,
        model: Decoder,
        teacher: Decoder | None,
        documents: Sequence[PolicyDocument],
        micro_batch: MicroBatch,
        activations: Activations,
    ) -> PolicySums:
        with _naming_trajectories(documents, micro_batch):
            output: ForwardOutput = model(
                micro_batch.token_ids,
                micro_batch.layout,
                attention=self.attention,
                activations=activations,
                replayed=self._replayed(model, micro_batch),
            )
        policy, entropy = self._logprobs(model, output, micro_batch, documents, with_entropy=True)
        assert entropy is not None
        inputs = _loss_inputs(policy, documents, micro_batch)
        if teacher is not None:
            scores = self._teacher_logprobs(teacher, micro_batch, documents)
            inputs = replace(
                inputs, advantages=distillation_advantages(policy, scores.to(policy.dtype))
            )
        _refuse_non_finite(inputs, documents, micro_batch)
        with boundary(ContractError, "the policy loss failed"):
            loss: TokenLoss = self.loss(inputs, **self.loss_settings)
        if not math.isfinite(loss.loss_sum.item()):
            raise ContractError(
                f"the loss is {loss.loss_sum.item()} although all its inputs are finite, from one of the "
                f"trajectories {_trajectory_ids(documents, micro_batch)}; check the settings of the loss"
            )
        loss.loss_sum.backward()  # type: ignore[no-untyped-call]
        order = torch.tensor([document.index for document in documents])
        columns = {
            "document": order[micro_batch.sequence_indices],
            "position": micro_batch.positions,
            "policy": policy,
            "log_ratio": policy - inputs.behaviour_logprobs,
            "advantage": inputs.advantages,
            "entropy": entropy,
        }
        return PolicySums(
            loss=loss.loss_sum.item(),
            normaliser=loss.normaliser.item(),
            num_rejected=loss.num_rejected.item(),
            num_trained_tokens=len(policy),
            expert_counts=output.expert_counts.numpy().astype(np.float64),
            columns={
                name: [values.detach().to(torch.float64).numpy()]
                for name, values in columns.items()
            },
        )

    def _replayed(self, model: Decoder, micro_batch: MicroBatch) -> Routing | None:
        """Return what the engine routed the packed tokens to.

        Raises:
            ContractError: it did not say, or said it of another model.
        """
        shape = RoutingShape.of(model.config, self.routing_replay, attention=self.attention)
        if shape is None:
            return None
        positions = micro_batch.layout.position_ids().tolist()
        return shape.decode(micro_batch.routing or [b""] * len(positions), positions)

    def _logprobs(
        self,
        model: Decoder,
        output: ForwardOutput,
        micro_batch: MicroBatch,
        documents: Sequence[PolicyDocument],
        *,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Project only the rows that predict a trained token, each onto what its token was drawn from."""
        return scored(
            output.hidden[micro_batch.source_rows],
            model.output_weight,
            micro_batch.target_ids,
            _kept_ids(documents, micro_batch),
            temperature=self.temperature,
            with_entropy=with_entropy,
            compute_dtype=model.compute_dtype,
        )

    @torch.no_grad()
    def _teacher_logprobs(
        self, teacher: Decoder, micro_batch: MicroBatch, documents: Sequence[PolicyDocument]
    ) -> Tensor:
        """Score each token at the temperature of the rollout, among the ids it was drawn from."""
        output: ForwardOutput = teacher(
            micro_batch.token_ids, micro_batch.layout, attention=self.attention
        )
        return self._logprobs(teacher, output, micro_batch, documents, with_entropy=False)[0]


def _kept_ids(
    documents: Sequence[PolicyDocument], micro_batch: MicroBatch
) -> list[Sequence[int]] | None:
    """Return of each target the ids it was drawn from, empty for all; None where that holds for all targets."""
    own = [documents[i].kept_ids for i in micro_batch.sequence_indices.tolist()]
    pairs = zip(own, micro_batch.positions.tolist(), strict=True)
    kept_ids: list[Sequence[int]] = [() if ids is None else ids[p] for ids, p in pairs]
    return kept_ids if any(kept_ids) else None


def _loss_inputs(
    policy: Tensor, documents: Sequence[PolicyDocument], micro_batch: MicroBatch
) -> LossInputs:
    own = [documents[i] for i in micro_batch.sequence_indices.tolist()]
    behaviour = [
        document.behaviour_logprobs[position]
        for document, position in zip(own, micro_batch.positions.tolist(), strict=True)
    ]
    return LossInputs(
        policy_logprobs=policy,
        proximal_logprobs=policy.detach(),
        behaviour_logprobs=policy.new_tensor(behaviour),
        advantages=policy.new_tensor([document.advantage for document in own]),
        train_mask=torch.ones_like(policy, dtype=torch.bool),
        token_weights=policy.new_tensor([document.token_weight for document in own]),
        sequence_ids=micro_batch.sequence_indices,
    )


def _refuse_non_finite(
    inputs: LossInputs, documents: Sequence[PolicyDocument], micro_batch: MicroBatch
) -> None:
    for name in ("policy_logprobs", "behaviour_logprobs", "advantages", "token_weights"):
        values: Tensor = getattr(inputs, name).detach()
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            row = int(bad[0])
            document = documents[int(micro_batch.sequence_indices[row])]
            raise ContractError(
                f"trajectory {document.trajectory_id}: {name} of token {int(micro_batch.positions[row])} in "
                f"segment {document.segment_order} is {values[row].item()}; the weights are unchanged. "
                f"Look for damaged weights, or an engine that sampled from another distribution"
            )


@contextmanager
def _naming_trajectories(
    documents: Sequence[PolicyDocument], micro_batch: MicroBatch
) -> Iterator[None]:
    """Say in an error of a pass whose tokens were in it."""
    try:
        yield
    except ContractError as error:
        ids = _trajectory_ids(documents, micro_batch)
        raise ContractError(f"in a pass over the trajectories {ids}: {error}") from error


def _trajectory_ids(documents: Sequence[PolicyDocument], micro_batch: MicroBatch) -> list[str]:
    return sorted({documents[i].trajectory_id for i in micro_batch.sequence_indices.tolist()})
