"""Reinforcement learning and on-policy distillation: one optimizer step per batch of groups.

::

    groups -> items (advantage, weight) -> packed micro-batches -> log pi of trained tokens
           -> PolicyLoss (sum, normaliser) -> summed gradients -> divide once, clip, step

A batch gets exactly one update, so the policy at the start of the step is the policy of the forward
pass: proximal log-probabilities are that pass, detached, and cost nothing.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from longarc.algos.advantages import group_advantages
from longarc.algos.distill import distillation_advantages
from longarc.algos.protocols import AdvantageFn, LossInputs, PolicyLoss
from longarc.algos.token_loss import TokenLoss
from longarc.config.training import OptimizerConfig
from longarc.errors import ConfigError, ContractError, boundary
from longarc.models.decoder_base import Decoder, ForwardOutput
from longarc.models.moe import update_router_bias
from longarc.models.projection import token_logprobs
from longarc.records.batch import Batch, StepReport
from longarc.records.sampling import WeightSource
from longarc.trainer.checkpoint import load_training_state, save_training_state
from longarc.trainer.credit import Reduction, TrainItem, train_items
from longarc.trainer.freeze import is_indexer, train_only
from longarc.trainer.observation import Observation, StepFacts
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.packing import Document, MicroBatch, pack_shared
from longarc.trainer.publish import WeightPublisher
from longarc.trainer.update import (
    clip_gradients,
    divide_gradients,
    learning_rate,
    weights_sha256,
)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How an RL or distillation stage trains."""

    optimizer: OptimizerConfig
    num_steps: int
    """Length of the stage, for the schedule [optimizer steps]."""
    micro_batch_tokens: int
    """Tokens in one forward and backward [tokens]; memory, not results."""
    temperature: float = 1.0
    """Of the rollouts: log-probabilities are those of the distribution that was sampled."""
    attention: Literal["dense", "sparse"] = "sparse"
    """What the engine used."""
    reduction: Reduction = "token_mean"
    """What counts alike: tokens or trajectories."""
    loss_settings: Mapping[str, float] = field(default_factory=dict)
    """Keyword settings of the loss."""
    router_bias_rate: float = 0.0
    """Step of the loss-free expert balancing; 0 in RL."""
    num_token_reports: int = 4
    """Segments per step whose per-token results are reported."""


class PolicyTrainer:
    """Satisfies ``records.ports.Trainer`` in the process it lives in."""

    def __init__(
        self,
        model: Decoder,
        settings: PolicySettings,
        *,
        loss: PolicyLoss,
        publish_directory: str,
        teachers: Mapping[str, Decoder] | None = None,
        advantage_fn: AdvantageFn = group_advantages,
        policy_version: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over ``model``: everything but the indexer is trained (GLM-5, section 3.2).

        Args:
            model: is trained in place.
            settings: see the fields.
            loss: the objective; its settings are checked here.
            publish_directory: existing directory for weight files that engines read.
            teachers: frozen teacher of each family; None trains on rewards.
            advantage_fn: group baseline; not used with teachers.
            policy_version: optimizer steps that are already in the weights.
            clock: monotonic [seconds]; only measures throughput.

        Raises:
            ConfigError: the loss does not take these settings, or the temperature is 0.
        """
        if not settings.temperature > 0:
            raise ConfigError(
                f"temperature={settings.temperature} has no log-probabilities to train on: greedy "
                f"rollouts are for evaluation; set a temperature above 0"
            )
        self.model = model
        self.policy_version = policy_version
        self._settings = settings
        self._loss = _bind(loss, settings.loss_settings)
        self._teachers = teachers
        self._advantage_fn = advantage_fn
        self._publisher = WeightPublisher(publish_directory)
        self._clock = clock
        # One thread and not a lock: a caller that is cancelled leaves the step running, and whoever
        # saves next must still wait for it. Asking for the thread count applies it to the new thread.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="trainer", initializer=torch.get_num_threads
        )
        train_only(model, lambda name: not is_indexer(name))
        for teacher in (teachers or {}).values():
            train_only(teacher, lambda _: False)
        self._optimizer = MuonAdamW(model, model.config, settings.optimizer)

    async def step(self, batch: Batch) -> StepReport:
        """Take one optimizer step in the trainer's thread; see :meth:`take_step`."""
        return await self._in_thread(self.take_step, batch)

    async def publish(self) -> WeightSource:
        """Write the current weights where engines can read them.

        Raises:
            ResourceError: the disk is full or not writable.
        """
        return await self._in_thread(
            lambda: self._publisher.publish(self.model, self.policy_version)
        )

    async def save(self, directory: str) -> None:
        """Write weights, moments and counters into an existing empty directory.

        Raises:
            ResourceError: the disk is full or not writable.
        """

        def write() -> None:
            save_training_state(
                directory,
                model=self.model,
                optimizer=self._optimizer,
                counters={"policy_version": self.policy_version},
            )

        await self._in_thread(write)

    def load(self, directory: str) -> None:
        """Continue exactly where :meth:`save` was called.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged or of another model.
        """
        counters = load_training_state(directory, model=self.model, optimizer=self._optimizer)
        self.policy_version = counters["policy_version"]

    def take_step(self, batch: Batch) -> StepReport:
        """Take one optimizer step.

        Raises:
            ContractError: the batch is for other weights, malformed, or a loss or gradient is not
                finite (the message names the trajectory). The weights are then unchanged.
            ConfigError: a segment is longer than ``micro_batch_tokens``, or a family has no teacher.
        """
        started_s = self._clock()
        if batch.trainer_version != self.policy_version:
            raise ContractError(
                f"batch of step {batch.step} is for weights of version {batch.trainer_version} but the "
                f"trainer has version {self.policy_version}; batch and trainer come from different runs "
                f"or a step was lost"
            )
        settings = self._settings
        items = train_items(
            batch,
            reduction=settings.reduction,
            advantage_fn=self._advantage_fn if self._teachers is None else None,
        )
        if self._teachers is not None:
            items = _by_teacher(items, self._teachers)
        if batch.resets_optimizer:
            self._optimizer.reset()
        observation = Observation(items, trainer_version=batch.trainer_version)
        normaliser = self._accumulate_all(items, observation)
        parameters = self._optimizer.parameters
        divide_gradients(parameters, normaliser)
        grad_norm = clip_gradients(parameters, max_norm=settings.optimizer.grad_clip)
        if not math.isfinite(grad_norm):
            raise ContractError(
                f"the gradient norm of step {batch.step} is {grad_norm}, from trajectory "
                f"{self._culprit(items)}; the weights are unchanged. Lower the learning rate or the "
                f"bounds of the loss"
            )
        lr = learning_rate(batch.step, settings.optimizer, num_steps=settings.num_steps)
        self._optimizer.step(lr)
        if settings.router_bias_rate > 0 and observation.expert_counts is not None:
            update_router_bias(self.model, observation.expert_counts, settings.router_bias_rate)
        self._optimizer.zero_grad()
        self.policy_version += 1
        facts = StepFacts(
            grad_norm=grad_norm,
            lr=lr,
            normaliser=normaliser,
            elapsed_s=self._clock() - started_s,
            is_distillation=self._teachers is not None,
        )
        return StepReport(
            step=batch.step,
            policy_version=self.policy_version,
            weights_sha256=weights_sha256(self.model),
            num_trained_tokens=observation.num_trained_tokens,
            metrics=observation.metrics(batch, facts),
            token_reports=observation.token_reports(settings.num_token_reports),
            histograms=observation.histograms(),
        )

    async def _in_thread(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _accumulate_all(self, items: Sequence[TrainItem], observation: Observation) -> float:
        """Leave summed gradients on the parameters; return the global normaliser."""
        self._optimizer.zero_grad()
        documents = [
            Document(token_ids=i.segment.token_ids, train_mask=i.segment.train_mask) for i in items
        ]
        for item in items:
            if item.segment.train_mask[0]:
                raise ContractError(
                    f"trajectory {item.trajectory.id}: segment {item.segment.order} trains on its first "
                    f"token, which nothing predicts; a segment starts with a prompt"
                )
        normaliser = 0.0
        for micro_batch in pack_shared(
            documents, micro_batch_tokens=self._settings.micro_batch_tokens
        ):
            normaliser += self._accumulate(micro_batch, items, observation)
        return normaliser

    def _accumulate(
        self, micro_batch: MicroBatch, items: Sequence[TrainItem], observation: Observation
    ) -> float:
        """Add one micro-batch's gradients and observations; return its normaliser."""
        output: ForwardOutput = self.model(
            micro_batch.token_ids, micro_batch.layout, attention=self._settings.attention
        )
        policy, entropy = self._logprobs(self.model, output, micro_batch, with_entropy=True)
        token = _TokenTable.gather(micro_batch, items, like=policy)
        advantages = token.advantages
        if self._teachers is not None:
            teacher = self._teacher_logprobs(self._teachers, micro_batch, items)
            advantages = distillation_advantages(policy, teacher.to(policy.dtype))
        inputs = LossInputs(
            policy_logprobs=policy,
            proximal_logprobs=policy.detach(),
            behaviour_logprobs=token.behaviour_logprobs,
            advantages=advantages,
            train_mask=torch.ones_like(policy, dtype=torch.bool),
            token_weights=token.weights,
        )
        self._refuse_non_finite(inputs, micro_batch, items)
        loss = self._loss(inputs)
        if not math.isfinite(loss.loss_sum.item()):
            raise ContractError(
                f"the loss is {loss.loss_sum.item()} although all its inputs are finite, from one of the "
                f"trajectories {_trajectory_ids(micro_batch, items)}; check the settings of the loss"
            )
        loss.loss_sum.backward()  # type: ignore[no-untyped-call]
        observation.add(
            micro_batch,
            inputs,
            loss,
            entropy=None if entropy is None else entropy.detach(),
            expert_counts=output.expert_counts.detach(),
        )
        return loss.normaliser.item()

    def _logprobs(
        self, model: Decoder, output: ForwardOutput, micro_batch: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Project only the rows that predict a trained token."""
        return token_logprobs(
            output.hidden[micro_batch.source_rows],
            model.output_weight,
            micro_batch.target_ids,
            temperature=self._settings.temperature,
            with_entropy=with_entropy,
        )

    @torch.no_grad()
    def _teacher_logprobs(
        self, teachers: Mapping[str, Decoder], micro_batch: MicroBatch, items: Sequence[TrainItem]
    ) -> Tensor:
        """Score each token with the teacher of its family, at the temperature of the rollout."""
        families = [items[i].trajectory.family for i in micro_batch.sequence_indices.tolist()]
        scores = torch.zeros(len(families), dtype=self.model.output_weight.dtype)
        for teacher in _distinct(teachers[family] for family in sorted(set(families))):
            output: ForwardOutput = teacher(
                micro_batch.token_ids, micro_batch.layout, attention=self._settings.attention
            )
            logprobs, _ = self._logprobs(teacher, output, micro_batch, with_entropy=False)
            is_own = torch.tensor([teachers[family] is teacher for family in families])
            scores = torch.where(is_own, logprobs.to(scores.dtype), scores)
        return scores

    def _refuse_non_finite(
        self, inputs: LossInputs, micro_batch: MicroBatch, items: Sequence[TrainItem]
    ) -> None:
        for name in ("policy_logprobs", "behaviour_logprobs", "advantages", "token_weights"):
            values: Tensor = getattr(inputs, name).detach()
            bad = (~values.isfinite()).nonzero()
            if len(bad):
                row = int(bad[0])
                item = items[int(micro_batch.sequence_indices[row])]
                raise ContractError(
                    f"trajectory {item.trajectory.id}: {name} of token {int(micro_batch.positions[row])} in "
                    f"segment {item.segment.order} is {values[row].item()}; the weights are unchanged. "
                    f"Look for damaged weights, or an engine that sampled from another distribution"
                )

    def _culprit(self, items: Sequence[TrainItem]) -> str:
        """Find the trajectory whose gradient alone is not finite; only called when all is lost."""
        for item in items:
            self._accumulate_all([item], Observation([item], trainer_version=self.policy_version))
            if not math.isfinite(clip_gradients(self._optimizer.parameters, max_norm=math.inf)):
                return item.trajectory.id
        return "unknown (each alone has a finite gradient, so their sum overflows)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TokenTable:
    """Per-token constants of a micro-batch, aligned with its targets."""

    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor

    @classmethod
    def gather(
        cls, micro_batch: MicroBatch, items: Sequence[TrainItem], *, like: Tensor
    ) -> "_TokenTable":
        pairs = list(
            zip(micro_batch.sequence_indices.tolist(), micro_batch.positions.tolist(), strict=True)
        )
        behaviour = [items[i].segment.behaviour_logprobs[p] for i, p in pairs]
        return cls(
            behaviour_logprobs=like.new_tensor(behaviour),
            advantages=like.new_tensor([items[i].advantage for i, _ in pairs]),
            weights=like.new_tensor([items[i].token_weight for i, _ in pairs]),
        )


def _trajectory_ids(micro_batch: MicroBatch, items: Sequence[TrainItem]) -> list[str]:
    return sorted({items[i].trajectory.id for i in micro_batch.sequence_indices.tolist()})


def _by_teacher(items: Sequence[TrainItem], teachers: Mapping[str, Decoder]) -> list[TrainItem]:
    """Order items so that most micro-batches need one teacher only."""
    missing = sorted({item.trajectory.family for item in items} - set(teachers))
    if missing:
        raise ConfigError(
            f"families {missing} have no teacher; teachers are given for {sorted(teachers)}"
        )
    order = {id(t): i for i, t in enumerate(_distinct(teachers[f] for f in sorted(teachers)))}
    return sorted(items, key=lambda item: order[id(teachers[item.trajectory.family])])


def _distinct(teachers: Iterable[Decoder]) -> list[Decoder]:
    """Return each teacher once; several families may share one."""
    return list({id(teacher): teacher for teacher in teachers}.values())


def _bind(
    loss: PolicyLoss, loss_settings: Mapping[str, float]
) -> Callable[[LossInputs], TokenLoss]:
    """Return the loss with its settings, which are checked against its signature now."""
    try:
        inspect.signature(loss).bind(None, **loss_settings)
    except TypeError as error:
        raise ConfigError(
            f"the loss does not take the settings {dict(loss_settings)}: {error}; it takes "
            f"{inspect.signature(loss)}"
        ) from error

    def bound(inputs: LossInputs) -> TokenLoss:
        with boundary(ContractError, "the policy loss failed"):
            return loss(inputs, **loss_settings)

    return bound
