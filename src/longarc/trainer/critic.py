"""The critic's part of a step: value every segment, spread the rewards, learn several times from the same tokens.

::

    items -> values (a pass without gradients) -> advantages and targets -> K times: gradients -> divide, clip, update
                                                        |
                                                        +-> the policy's own step

The advantages are those of the values before the updates. The optimizer is the critic's own, and so are its files in a
checkpoint.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from longarc.algos.value_loss import explained_variance
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import ContractError
from longarc.models.critic import Critic
from longarc.records.metric import Metric
from longarc.records.segment import SegmentKind
from longarc.trainer.checkpoint import load_critic_state, save_critic_state
from longarc.trainer.credit import Column, TrainItem
from longarc.trainer.critic_objective import (
    CriticDocument,
    CriticObjective,
    CriticSums,
    Lesson,
    TrainedPart,
)
from longarc.trainer.gradients import GradientSource, in_this_process
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.update import clip_gradients, divide_gradients, learning_rate
from longarc.trainer.value_credit import GaeSettings, ends_in_a_cut, value_credit


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """How a critic learns beside a policy, or before it."""

    optimizer: OptimizerConfig
    num_steps: int
    """Length of the stage, for the schedule [optimizer steps of the policy]."""
    micro_batch_tokens: int
    """Tokens in one forward and backward [tokens]; memory, not results."""
    attention: Literal["dense", "sparse"] = "sparse"
    """What the policy does."""
    trains: TrainedPart = "feed_forward"
    updates_per_step: int = 2
    """K, updates from the tokens of one step."""
    clip: float | None = 0.2
    """How far a value may move in one step; None is without limit."""
    gae: GaeSettings = field(default_factory=GaeSettings)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward; memory, not results."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Critique:
    """What the critic says of a step. Columns are aligned with the tokens of each segment."""

    values: list[Column]
    """V of trained tokens, before the updates."""
    advantages: list[Column]
    returns: list[Column]
    metrics: tuple[Metric, ...]


class CriticLearner:
    """A critic that learns from the segments of each step."""

    def __init__(
        self,
        critic: Critic,
        settings: CriticSettings,
        *,
        gradients: GradientSource = in_this_process,
        is_beside: bool = True,
        num_update_threads: int = 1,
    ) -> None:
        """Take over a critic, which is trained in place.

        Args:
            critic: its ``requires_grad`` flags are set by the settings.
            settings: see the fields.
            gradients: where values and gradients are computed.
            is_beside: whether a policy's gradients were asked for before and stay in use.
            num_update_threads: threads of the optimizer.

        Raises:
            ContractError: the backbone has nothing that is trained under the settings.
        """
        self.critic = critic
        self._settings = settings
        self._objective = CriticObjective(
            micro_batch_tokens=settings.micro_batch_tokens,
            attention=settings.attention,
            trains=settings.trains,
            clip=settings.clip,
            activations=settings.activations,
        )
        self._add_gradients = gradients(critic, self._objective, beside=is_beside)
        self._optimizer = MuonAdamW(
            critic, critic.config, settings.optimizer, num_threads=num_update_threads
        )

    def step(
        self, items: Sequence[TrainItem], step: int, *, penalties: Mapping[str, float] | None = None
    ) -> Critique:
        """Value the segments of a step, then learn from them.

        Args:
            items: all segments of the step with trained tokens.
            step: 0-based step of the stage, for the schedule and for messages.
            penalties: what a trajectory's reward loses, by its id.

        Raises:
            ContractError: a trajectory has no reward, or a value, a loss or a gradient is not finite.
            ConfigError: a segment is longer than ``micro_batch_tokens``.
        """
        settings = self._settings
        values = self._values(items, step)
        credit = value_credit(items, values, settings.gae, penalties=penalties or {})
        documents = [
            _document(
                index,
                item,
                lesson=Lesson(
                    returns=credit.returns[index],
                    old_values=values[index],
                    token_weight=item.token_weight,
                ),
            )
            for index, item in enumerate(items)
        ]
        lr = learning_rate(step, settings.optimizer, num_steps=settings.num_steps)
        sums, norms = [], []
        for update in range(settings.updates_per_step):
            own, norm = self._update(documents, step, update, lr)
            sums.append(own)
            norms.append(norm)
        lengths = [len(item.segment.token_ids) for item in items]
        values = [own[:length] for own, length in zip(values, lengths, strict=True)]
        metrics = [
            *_credit_metrics(items, values, credit.advantages, credit.returns),
            *_update_metrics(sums, is_clipped=settings.clip is not None),
            Metric("grad/critic_norm", sum(norms), len(norms)),
            Metric("train/critic_lr", lr),
        ]
        return Critique(
            values=values,
            advantages=credit.advantages,
            returns=credit.returns,
            metrics=tuple(metrics),
        )

    def save(self, directory: str) -> None:
        """Write weights and moments into an existing directory.

        Raises:
            ResourceError: the disk is full or not writable.
        """
        save_critic_state(directory, critic=self.critic, optimizer=self._optimizer)

    def load(self, directory: str) -> None:
        """Continue exactly where :meth:`save` was called.

        Raises:
            CheckpointError: the checkpoint has no critic, or another one, or is damaged.
        """
        load_critic_state(directory, critic=self.critic, optimizer=self._optimizer)

    def _values(self, items: Sequence[TrainItem], step: int) -> list[Column]:
        """Return V of the trained tokens of every segment, and of the state behind it where a limit cut it off."""
        is_cut = ends_in_a_cut(items, self._settings.gae)
        documents = [
            _document(index, item, values_end=cut)
            for index, (item, cut) in enumerate(zip(items, is_cut, strict=True))
        ]
        sums = self._add_gradients(documents, step)
        return sums.values_of([len(document.token_ids) for document in documents])

    def _update(
        self, documents: Sequence[CriticDocument], step: int, update: int, lr: float
    ) -> tuple[CriticSums, float]:
        self._optimizer.zero_grad()
        sums: CriticSums = self._add_gradients(documents, step)
        parameters = self._optimizer.parameters
        divide_gradients(parameters, sums.normaliser)
        norm = clip_gradients(parameters, max_norm=self._settings.optimizer.grad_clip)
        if not math.isfinite(norm):
            raise ContractError(
                f"the gradient norm of the critic is {norm} in step {step}, update {update}; the policy's weights are "
                f"unchanged. Lower the critic's learning rate, or look for rewards of enormous size"
            )
        self._optimizer.step(lr)
        self._optimizer.zero_grad()
        return sums, norm


def _document(
    index: int, item: TrainItem, *, lesson: Lesson | None = None, values_end: bool = False
) -> CriticDocument:
    """Return what the objective sees of a segment.

    With ``values_end``, one more token is asked for behind the last: nothing is computed from that token itself, but
    the value of the state in which it would be sampled is that behind the segment.
    """
    segment = item.segment
    if segment.train_mask[0]:
        raise ContractError(
            f"trajectory {item.trajectory.id}: segment {segment.order} trains on its first token, which nothing "
            f"predicts; a segment starts with a prompt"
        )
    return CriticDocument(
        token_ids=(*segment.token_ids, 0) if values_end else segment.token_ids,
        train_mask=(*segment.train_mask, True) if values_end else segment.train_mask,
        index=index,
        trajectory_id=item.trajectory.id,
        segment_order=segment.order,
        lesson=lesson,
    )


def _credit_metrics(
    items: Sequence[TrainItem],
    values: Sequence[Column],
    advantages: Sequence[Column],
    returns: Sequence[Column],
) -> list[Metric]:
    """Describe values, targets and advantages over the trained tokens of a step."""
    masks = [np.asarray(item.segment.train_mask, dtype=bool) for item in items]
    value, advantage, target = (
        np.concatenate([column[mask] for column, mask in zip(columns, masks, strict=True)])
        for columns in (values, advantages, returns)
    )
    metrics = [
        Metric("critic/value_mean", float(value.sum()), len(value)),
        Metric("return/mean", float(target.sum()), len(target)),
        Metric("return/std", float(target.std())),
        Metric("return/min", float(target.min())),
        Metric("return/max", float(target.max())),
        Metric("advantage/mean", float(advantage.sum()), len(advantage)),
        Metric("advantage/std", float(advantage.std())),
        Metric("advantage/max_abs", float(np.abs(advantage).max()), reduce="max"),
    ]
    explained = explained_variance(
        torch.from_numpy(value), torch.from_numpy(target), torch.ones(len(value), dtype=torch.bool)
    )
    if not math.isnan(explained):
        metrics.append(Metric("critic/explained_variance", explained))
    kinds = [item.segment.kind for item in items]
    if len(set(kinds)) > 1:
        for kind in SegmentKind:
            own = [a[m] for a, m, k in zip(advantages, masks, kinds, strict=True) if k is kind]
            tokens = np.concatenate([np.zeros(0), *own])
            metrics.append(Metric(f"advantage/mean/{kind}", float(tokens.sum()), len(tokens)))
    return metrics


def _update_metrics(sums: Sequence[CriticSums], *, is_clipped: bool) -> list[Metric]:
    """Describe the updates: the loss before the first and before the last, which has learned from the same tokens."""
    metrics = [Metric("loss/value", sums[0].loss, sums[0].normaliser)]
    if len(sums) > 1:
        last = sums[-1]
        metrics.append(Metric("loss/value_last_update", last.loss, last.normaliser))
        if is_clipped:
            num_tokens = sum(len(piece) for piece in last.columns["value"])
            metrics.append(Metric("critic/clipped_frac", last.num_clipped, num_tokens))
    return metrics
