"""Training on given tokens: pre-training, mid-training, DSA conversion, fine-tuning and draft depths."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import ContractError
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Decoder
from longarc.models.moe import update_router_bias
from longarc.records.metric import Metric
from longarc.trainer.checkpoint import load_training_state, save_training_state
from longarc.trainer.draft_objective import DraftObjective, draft_metrics
from longarc.trainer.freeze import is_indexer, is_mtp
from longarc.trainer.gradients import GradientSource, in_this_process
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.packing import Document
from longarc.trainer.supervised_objective import LossSums, Mode, SupervisedObjective
from longarc.trainer.update import clip_gradients, divide_gradients, learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSettings:
    """How a supervised stage trains."""

    optimizer: OptimizerConfig
    num_steps: int
    """Length of the stage, for the schedule [optimizer steps]."""
    micro_batch_tokens: int
    """Tokens in one forward and backward [tokens]; memory, not results."""
    mode: Mode = "lm"
    """What is trained."""
    attention: Literal["dense", "sparse"] = "dense"
    """Which keys are attended to; the indexer warm-up is always dense."""
    indexer_loss_coeff: float = 1.0
    """Factor on the indexer's KL under sparse attention; 0 freezes the indexer."""
    indexer_stride: int = 1
    """The sparse indexer loss looks at every n-th query."""
    router_bias_rate: float = 1e-3
    """Step of the loss-free expert balancing of the layers that are trained; 0 turns it off."""
    int4_group_size: int | None = None
    """Numbers that share a scale where routed experts are trained as INT4; None trains without rounding."""
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward; memory, not results."""
    drafts: DraftObjective | None = None
    """How the MTP layer is trained, alone or along; its indexer learns as the model's does. None leaves the
    layer alone if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedReport:
    """What one optimizer step did."""

    step: int
    """Counted from 0."""
    policy_version: int
    """Version [optimizer steps] of the weights after the step."""
    num_trained_tokens: int
    metrics: tuple[Metric, ...]


class SupervisedTrainer:
    """Takes documents, one optimizer step at a time."""

    def __init__(
        self,
        model: Decoder,
        settings: SupervisedSettings,
        *,
        policy_version: int = 0,
        gradients: GradientSource = in_this_process,
        num_update_threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over ``model``: its ``requires_grad`` flags are set by the mode.

        Args:
            model: is trained in place.
            settings: see the fields.
            policy_version: optimizer steps that are already in the weights.
            gradients: where gradients are computed; ``GradientPool.open`` shares the work with processes.
            num_update_threads: threads of the optimizer, which works while those processes wait.
            clock: monotonic [seconds]; only measures throughput.
        """
        self.model = model
        self.step_index = 0
        """Optimizer steps taken in this stage."""
        self.policy_version = policy_version
        self._settings = settings
        self._clock = clock
        is_warmup = settings.mode == "indexer_warmup"
        learns_selection = settings.attention == "sparse" and settings.indexer_loss_coeff > 0
        drafts = settings.drafts
        objective = SupervisedObjective(
            micro_batch_tokens=settings.micro_batch_tokens,
            mode=settings.mode,
            attention=settings.attention,
            trains_indexer=is_warmup or (settings.mode == "lm" and learns_selection),
            indexer_stride=settings.indexer_stride,
            int4_group_size=settings.int4_group_size,
            activations=settings.activations,
            drafts=None if drafts is None else replace(drafts, trains_indexer=learns_selection),
        )
        self._add_gradients = gradients(model, objective)
        self._optimizer = MuonAdamW(
            model, model.config, settings.optimizer, num_threads=num_update_threads
        )
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        trunk = {n: p for n, p in named.items() if not is_mtp(n)}
        mtp = {n: p for n, p in named.items() if is_mtp(n)}
        self._indexer_parameters = [p for n, p in trunk.items() if is_indexer(n)]
        self._base_parameters = [p for n, p in trunk.items() if not is_indexer(n)]
        self._mtp_indexer_parameters = [p for n, p in mtp.items() if is_indexer(n)]
        self._mtp_parameters = [p for n, p in mtp.items() if not is_indexer(n)]
        own = {id(p) for p in mtp.values()}
        self._clipped_apart = {
            "grad/norm": [p for p in self._optimizer.parameters if id(p) not in own],
            "grad/mtp_norm": [p for p in self._optimizer.parameters if id(p) in own],
        }
        """Each is clipped to the largest norm by itself, so that no draft shortens the trunk's step."""

    def step(self, documents: Sequence[Document]) -> SupervisedReport:
        """Take one optimizer step on ``documents``.

        Raises:
            ContractError: nothing in the documents is trained, or loss or gradient is not finite;
                the weights are then unchanged.
            ConfigError: a document is longer than ``micro_batch_tokens``.
        """
        started_s = self._clock()
        settings = self._settings
        self._optimizer.zero_grad()
        sums = self._add_gradients(documents, self.step_index)
        if sums.num_targets == 0:
            raise ContractError(
                f"none of the {len(documents)} documents of step {self.step_index} has a trained token"
            )
        if settings.mode == "mtp" and (sums.drafts is None or not sums.drafts.num_drafts.any()):
            raise ContractError(
                f"none of the {len(documents)} documents of step {self.step_index} has a trained token with "
                f"two before it, so there is nothing to draft; give longer documents"
            )
        lr = learning_rate(self.step_index, settings.optimizer, num_steps=settings.num_steps)
        grad_norms = self._update(sums, lr)
        self.step_index += 1
        self.policy_version += 1
        return SupervisedReport(
            step=self.step_index - 1,
            policy_version=self.policy_version,
            num_trained_tokens=sums.num_targets,
            metrics=self._metrics(sums, lr, grad_norms, self._clock() - started_s),
        )

    def save(self, directory: str) -> None:
        """Write weights, moments and counters into an existing directory."""
        save_training_state(
            directory,
            model=self.model,
            optimizer=self._optimizer,
            counters={"step": self.step_index, "policy_version": self.policy_version},
        )

    def load(self, directory: str) -> None:
        """Continue exactly where :meth:`save` was called.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged or of another model or stage.
        """
        counters = load_training_state(directory, model=self.model, optimizer=self._optimizer)
        self.step_index = counters["step"]
        self.policy_version = counters["policy_version"]

    def _update(self, sums: LossSums, lr: float) -> dict[str, float]:
        """Divide, clip and step; return the gradient norms before clipping, by name."""
        settings, drafts = self._settings, sums.drafts
        # A KL reaches its own indexer and nothing else, so each loss has its own parameters and divisor.
        self._divide([*self._base_parameters, *self._mtp_parameters], sums.num_targets)
        coeff = 1.0 if settings.mode == "indexer_warmup" else settings.indexer_loss_coeff
        self._divide(self._indexer_parameters, sums.num_indexer_terms / (coeff or 1.0))
        if drafts is not None and drafts.num_indexer_terms:
            self._divide(self._mtp_indexer_parameters, drafts.num_indexer_terms / (coeff or 1.0))
        grad_norms = {
            name: clip_gradients(parameters, max_norm=settings.optimizer.grad_clip)
            for name, parameters in self._clipped_apart.items()
            if parameters
        }
        for name, norm in grad_norms.items():
            if not math.isfinite(norm):
                raise ContractError(
                    f"the gradient norm of step {self.step_index} ({name}) is {norm}; the weights are "
                    f"unchanged. Lower the learning rate, or look for damaged weights"
                )
        self._optimizer.step(lr)
        if settings.router_bias_rate > 0:
            self._balance(sums, settings.router_bias_rate)
        return grad_norms

    def _divide(self, parameters: Sequence[nn.Parameter], normaliser: float) -> None:
        if parameters:
            divide_gradients(parameters, normaliser)

    def _balance(self, sums: LossSums, rate: float) -> None:
        """Move the router biases of the layers that are trained."""
        if sums.expert_counts is not None and self._settings.mode == "lm":
            update_router_bias(self.model.model, torch.from_numpy(sums.expert_counts), rate)
        if sums.drafts is not None:
            assert isinstance(self.model, GlmMoeDsa)
            assert self.model.mtp is not None
            counts = torch.from_numpy(sums.drafts.expert_counts)[None]
            update_router_bias(self.model.mtp, counts, rate)

    def _metrics(
        self, sums: LossSums, lr: float, grad_norms: Mapping[str, float], elapsed_s: float
    ) -> tuple[Metric, ...]:
        metrics = [
            *(Metric(name, norm) for name, norm in grad_norms.items()),
            Metric("train/lr", lr),
            Metric("train/num_tokens", sums.num_targets, reduce="sum"),
            Metric("train/tokens_per_s", sums.num_targets, elapsed_s),
        ]
        if self._base_parameters:
            metrics.append(Metric("loss/lm_nats", sums.lm_loss, sums.num_targets))
        if sums.num_indexer_terms:
            metrics.append(
                Metric("loss/indexer_kl_nats", sums.indexer_loss, sums.num_indexer_terms)
            )
        if sums.expert_counts is not None and sums.expert_counts.size:
            share = sums.expert_counts.max(axis=1) / sums.expert_counts.mean(axis=1)
            metrics.append(Metric("router/max_load", float(share.max()), reduce="max"))
        if sums.drafts is not None:
            metrics += draft_metrics(sums.drafts, num_targets=sums.num_targets)
        return tuple(metrics)
