"""Reinforcement learning and on-policy distillation: one optimizer step per batch of groups.

::

    groups -> items (advantage, weight) -> documents -> PolicyObjective: summed gradients, normaliser
           -> divide once, clip, step

A batch gets exactly one update, so the policy at the start of the step is the policy of the forward
pass: proximal log-probabilities are that pass, detached, and cost nothing.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from longarc.algos.advantages import group_advantages
from longarc.algos.protocols import AdvantageFn, PolicyLoss
from longarc.algos.reductions import Reduction
from longarc.config.rollout import OverlongConfig
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import ConfigError, ContractError
from longarc.models.critic import Critic
from longarc.models.decoder_base import Decoder
from longarc.models.moe import update_router_bias
from longarc.models.routed_rows import RoutingShape
from longarc.records.batch import Batch, StepReport
from longarc.records.sampling import RoutingReplay, WeightSource
from longarc.tokens.grammar import Grammars
from longarc.trainer.baselines import RunningBaselines
from longarc.trainer.checkpoint import load_training_state, save_training_state
from longarc.trainer.credit import TrainItem, length_penalties, train_items
from longarc.trainer.critic import CriticLearner, CriticSettings, Critique
from longarc.trainer.gradients import GradientSource, in_this_process
from longarc.trainer.observation import Observation, StepFacts
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.policy_objective import PolicyDocument, PolicyObjective
from longarc.trainer.publish import WeightPublisher
from longarc.trainer.thread import TrainerThread
from longarc.trainer.update import (
    clip_gradients,
    divide_gradients,
    learning_rate,
    weights_sha256,
)


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
    """What counts alike: tokens, trajectories, segments or groups."""
    normalises_batch: bool = False
    """Whether advantages are normalised over the trained tokens of the whole step, after the group's baseline."""
    overlong: OverlongConfig | None = None
    """What long trajectories lose of their reward; None for nothing."""
    loss_settings: Mapping[str, float] = field(default_factory=dict)
    """Keyword settings of the loss."""
    router_bias_rate: float = 0.0
    """Step of the loss-free expert balancing; 0 in RL."""
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward; memory, not results."""
    critic: CriticSettings | None = None
    """How the critic learns, where one gives the advantages."""
    routing_replay: RoutingReplay = "none"
    """What of the engine's routing is replayed."""
    grammars: Grammars | None = None
    """Of the tokenizer; without them nothing that was sampled under a JSON schema can be trained."""
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
        advantage_fn: AdvantageFn | RunningBaselines | Critic = group_advantages,
        policy_version: int = 0,
        gradients: GradientSource = in_this_process,
        num_update_threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over ``model``: everything but indexer (GLM-5, section 3.2) and MTP layer is trained.

        Args:
            model: is trained in place.
            settings: see the fields.
            loss: the objective; its settings are checked here.
            publish_directory: existing directory for weight files that engines read.
            teachers: frozen teacher of each family; None trains on rewards.
            advantage_fn: group baseline, what rollouts earned lately, or a critic, which is trained in place as
                ``settings.critic`` says; not used with teachers.
            policy_version: optimizer steps that are already in the weights.
            gradients: where gradients are computed; ``GradientPool.open`` shares the work with processes.
            num_update_threads: threads of the optimizer, which works while those processes wait.
            clock: monotonic [seconds]; only measures throughput.

        Raises:
            ConfigError: the loss does not take these settings, the temperature is 0, or the model does not choose
                what is to be replayed.
            ContractError: there is a critic and no settings for it, or the other way round.
        """
        if isinstance(advantage_fn, Critic) != (settings.critic is not None):
            raise ContractError(
                f"advantage_fn is a {type(advantage_fn).__name__} and settings.critic is {settings.critic}: a critic "
                f"and how it learns are given together or not at all"
            )
        self.model = model
        self.policy_version = policy_version
        self._settings = settings
        self._teachers = teachers
        self._publisher = WeightPublisher(publish_directory)
        self._clock = clock
        self._thread = TrainerThread()
        self._objective = PolicyObjective(
            micro_batch_tokens=settings.micro_batch_tokens,
            temperature=settings.temperature,
            attention=settings.attention,
            loss=loss,
            loss_settings=settings.loss_settings,
            teachers=teachers,
            activations=settings.activations,
            routing_replay=settings.routing_replay,
        )
        # Refuses what the model cannot replay now and not after the first rollouts.
        RoutingShape.of(model.config, settings.routing_replay, attention=settings.attention)
        self._add_gradients = gradients(model, self._objective)
        self._optimizer = MuonAdamW(
            model, model.config, settings.optimizer, num_threads=num_update_threads
        )
        self._advantage_fn = None if isinstance(advantage_fn, Critic) else advantage_fn
        self._critic: CriticLearner | None = None
        if isinstance(advantage_fn, Critic) and settings.critic is not None:
            self._critic = CriticLearner(
                advantage_fn,
                settings.critic,
                gradients=gradients,
                num_update_threads=num_update_threads,
            )

    async def step(self, batch: Batch) -> StepReport:
        """Take one optimizer step in the trainer's thread; see :meth:`take_step`."""
        return await self._thread.run(self.take_step, batch)

    async def publish(self) -> WeightSource:
        """Write the current weights where engines can read them.

        Raises:
            ResourceError: the disk is full or not writable.
        """
        return await self._thread.run(
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
            if isinstance(self._advantage_fn, RunningBaselines):
                self._advantage_fn.save(directory)
            if self._critic is not None:
                self._critic.save(directory)

        await self._thread.run(write)

    def load(self, directory: str) -> None:
        """Continue exactly where :meth:`save` was called.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged or of another model.
        """
        counters = load_training_state(directory, model=self.model, optimizer=self._optimizer)
        self.policy_version = counters["policy_version"]
        if isinstance(self._advantage_fn, RunningBaselines):
            self._advantage_fn.load(directory)
        if self._critic is not None:
            self._critic.load(directory)

    def take_step(self, batch: Batch) -> StepReport:
        """Take one optimizer step, after the critic's where there is one.

        Raises:
            ContractError: the batch is for other weights, malformed, or a loss or gradient is not
                finite (the message names the trajectory). The policy's weights are then unchanged.
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
            advantage_fn=None if self._teachers is not None else self._advantage_fn,
            normalises_batch=settings.normalises_batch,
            overlong=settings.overlong,
        )
        if self._teachers is not None:
            _check_teachers(items, self._teachers)
        penalties = length_penalties(batch, settings.overlong)
        critique: Critique | None = None
        if self._critic is not None:
            critique = self._critic.step(items, batch.step, penalties=penalties)
            items = [
                replace(item, advantages=own)
                for item, own in zip(items, critique.advantages, strict=True)
            ]
        if batch.resets_optimizer:
            self._optimizer.reset()
        documents = documents_of(
            items, replays=settings.routing_replay != "none", grammars=settings.grammars
        )
        self._optimizer.zero_grad()
        sums = self._add_gradients(documents, batch.step)
        parameters = self._optimizer.parameters
        divide_gradients(parameters, sums.normaliser)
        grad_norm = clip_gradients(parameters, max_norm=settings.optimizer.grad_clip)
        if not math.isfinite(grad_norm):
            raise ContractError(
                f"the gradient norm of step {batch.step} is {grad_norm}, from trajectory "
                f"{self._culprit(documents, batch.step)}; the weights are unchanged. Lower the learning rate or the "
                f"bounds of the loss"
            )
        lr = learning_rate(batch.step, settings.optimizer, num_steps=settings.num_steps)
        self._optimizer.step(lr)
        if settings.router_bias_rate > 0 and sums.expert_counts is not None:
            counts = torch.from_numpy(sums.expert_counts)
            update_router_bias(self.model.model, counts, settings.router_bias_rate)
        self._optimizer.zero_grad()
        self.policy_version += 1
        facts = StepFacts(
            grad_norm=grad_norm,
            lr=lr,
            elapsed_s=self._clock() - started_s,
            is_distillation=self._teachers is not None,
            length_penalties=tuple(penalties.values()),
        )
        observation = Observation(items, sums, trainer_version=batch.trainer_version)
        critics = [] if self._critic is None else [self._critic.critic]
        return StepReport(
            step=batch.step,
            policy_version=self.policy_version,
            weights_sha256=weights_sha256(self.model, *critics),
            num_trained_tokens=sums.num_trained_tokens,
            metrics=observation.metrics(batch, facts)
            + (() if critique is None else critique.metrics),
            token_reports=observation.token_reports(
                settings.num_token_reports, values=None if critique is None else critique.values
            ),
            histograms=observation.histograms(),
        )

    def _culprit(self, documents: Sequence[PolicyDocument], step: int) -> str:
        """Find the trajectory whose gradient alone is not finite; only called when all is lost."""
        for document in documents:
            self._optimizer.zero_grad()
            self._objective.add_gradients(self.model, [document], step)
            if not math.isfinite(clip_gradients(self._optimizer.parameters, max_norm=math.inf)):
                return document.trajectory_id
        return "unknown (each alone has a finite gradient, so their sum overflows)"


def documents_of(
    items: Sequence[TrainItem], *, replays: bool = False, grammars: Grammars | None = None
) -> list[PolicyDocument]:
    """Return what the objective sees of each item.

    Args:
        items: the segments.
        replays: whether routing is replayed.
        grammars: say what constrained tokens were drawn from; without them such segments are refused.
    """
    for item in items:
        if item.segment.train_mask[0]:
            raise ContractError(
                f"trajectory {item.trajectory.id}: segment {item.segment.order} trains on its first "
                f"token, which nothing predicts; a segment starts with a prompt"
            )
    return [
        PolicyDocument(
            token_ids=item.segment.token_ids,
            train_mask=item.segment.train_mask,
            index=index,
            trajectory_id=item.trajectory.id,
            segment_order=item.segment.order,
            family=item.trajectory.family,
            behaviour_logprobs=item.segment.behaviour_logprobs,
            kept_ids=_drawn_from(item, grammars),
            routing=_routing_of(item) if replays else None,
            advantages=item.advantages,
            token_weight=item.token_weight,
        )
        for index, item in enumerate(items)
    ]


def _drawn_from(item: TrainItem, grammars: Grammars | None) -> Sequence[Sequence[int]] | None:
    """Return of each token the ids it was drawn from, those that follow from a constraint included."""
    segment = item.segment
    if not segment.constraints:
        return segment.kept_ids
    where = f"trajectory {item.trajectory.id}: segment {segment.order}"
    if grammars is None:
        raise ContractError(
            f"{where} was sampled under a JSON schema, and this trainer was not given the tokenizer that says what "
            f"the schema left to draw from; give it one"
        )
    found: list[Sequence[int]] = list(segment.kept_ids or [()] * len(segment.token_ids))
    try:
        for span in segment.constraints:
            if not any(segment.train_mask[span.start : span.stop]):
                continue
            walk = grammars.walk(span.constraint, span.stop_ids)
            for position in range(span.start, span.stop):
                if segment.train_mask[position] and not found[position]:
                    found[position] = walk.allowed()
                walk.take([segment.token_ids[position]])
    except (ConfigError, ContractError) as error:
        raise ContractError(f"{where}: {error}") from error
    return found


def _routing_of(item: TrainItem) -> Sequence[bytes]:
    if item.segment.routing is None:
        raise ContractError(
            f"trajectory {item.trajectory.id}: segment {item.segment.order} has no routing to replay: the engine that "
            f"sampled it recorded none. Sample it again, or set rollout.routing_replay to what it was sampled with"
        )
    return item.segment.routing


def _check_teachers(items: Sequence[TrainItem], teachers: Mapping[str, Decoder]) -> None:
    missing = sorted({item.trajectory.family for item in items} - set(teachers))
    if missing:
        raise ConfigError(
            f"families {missing} have no teacher; teachers are given for {sorted(teachers)}"
        )
