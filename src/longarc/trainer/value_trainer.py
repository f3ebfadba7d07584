"""Value pre-training: a critic learns what rollouts of a policy earn, while the policy stays as it is.

A policy that is trained on the advantages of a critic that knows nothing is pushed in directions that mean nothing; so
the critic comes first.

Source: value pre-training of VAPO (arXiv:2504.05118), enlarged in SAO (arXiv:2607.07508).
"""

import time
from collections.abc import Callable
from pathlib import Path

from longarc.config.rollout import OverlongConfig
from longarc.errors import ContractError, ResourceError, boundary
from longarc.models.critic import Critic
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import save_weights
from longarc.records.batch import Batch, StepReport
from longarc.records.metric import Metric
from longarc.records.sampling import WeightSource
from longarc.trainer.checkpoint import WEIGHTS_FILE
from longarc.trainer.credit import length_penalties, train_items
from longarc.trainer.critic import CriticLearner, CriticSettings
from longarc.trainer.gradients import GradientSource, in_this_process
from longarc.trainer.publish import WeightPublisher
from longarc.trainer.thread import TrainerThread
from longarc.trainer.update import weights_sha256


class ValueTrainer:
    """Satisfies ``records.ports.Trainer``; the policy's version never grows."""

    def __init__(
        self,
        policy: Decoder,
        critic: Critic,
        settings: CriticSettings,
        *,
        publish_directory: str,
        policy_version: int = 0,
        overlong: OverlongConfig | None = None,
        gradients: GradientSource = in_this_process,
        num_update_threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over a critic.

        Args:
            policy: sampled what comes; published and saved, never changed.
            critic: is trained in place.
            settings: how.
            publish_directory: existing directory for weight files that engines read.
            policy_version: optimizer steps in the policy's weights.
            overlong: what long rollouts lose of their reward; None for nothing.
            gradients: where values and gradients are computed.
            num_update_threads: threads of the optimizer.
            clock: monotonic [seconds]; only measures throughput.
        """
        self.policy_version = policy_version
        self._overlong = overlong
        self._policy = policy
        self._critic = CriticLearner(
            critic,
            settings,
            gradients=gradients,
            is_beside=False,
            num_update_threads=num_update_threads,
        )
        self._publisher = WeightPublisher(publish_directory)
        self._clock = clock
        self._thread = TrainerThread()

    async def step(self, batch: Batch) -> StepReport:
        """Take the critic's updates of one step in the trainer's thread; see :meth:`take_step`."""
        return await self._thread.run(self.take_step, batch)

    async def publish(self) -> WeightSource:
        """Write the policy's weights where engines can read them.

        Raises:
            ResourceError: the disk is full or not writable.
        """
        return await self._thread.run(
            lambda: self._publisher.publish(self._policy, self.policy_version)
        )

    async def save(self, directory: str) -> None:
        """Write the policy, the critic and its moments into an existing empty directory.

        Raises:
            ResourceError: the disk is full or not writable.
        """

        def write() -> None:
            with boundary(ResourceError, f"cannot write the checkpoint {directory}"):
                save_weights(self._policy, Path(directory) / WEIGHTS_FILE)
            self._critic.save(directory)

        await self._thread.run(write)

    def load(self, directory: str) -> None:
        """Continue exactly where :meth:`save` was called; the policy is the one that was given.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged or of another critic.
        """
        self._critic.load(directory)

    def take_step(self, batch: Batch) -> StepReport:
        """Let the critic learn from one batch.

        Raises:
            ContractError: the batch is for other weights or malformed, or a loss or gradient is not finite.
            ConfigError: a segment is longer than ``micro_batch_tokens``.
        """
        started_s = self._clock()
        if batch.trainer_version != self.policy_version:
            raise ContractError(
                f"batch of step {batch.step} is for weights of version {batch.trainer_version} but the policy whose "
                f"values are learned has version {self.policy_version}; they come from different runs"
            )
        items = train_items(batch, reduction="token_mean", advantage_fn=None)
        penalties = length_penalties(batch, self._overlong)
        critique = self._critic.step(items, batch.step, penalties=penalties)
        num_tokens = sum(item.segment.num_trained_tokens for item in items)
        return StepReport(
            step=batch.step,
            policy_version=self.policy_version,
            weights_sha256=weights_sha256(self._policy, self._critic.critic),
            num_trained_tokens=num_tokens,
            metrics=(
                *critique.metrics,
                Metric("train/num_tokens", num_tokens, reduce="sum"),
                Metric("train/tokens_per_s", num_tokens, self._clock() - started_s),
            ),
        )
