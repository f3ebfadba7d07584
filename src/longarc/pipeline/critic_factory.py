"""Builds a critic, and the trainer of value pre-training, from plain data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from longarc.config.critic import CriticConfig, GaeConfig
from longarc.config.rollout import OverlongConfig
from longarc.config.training import ActivationConfig
from longarc.errors import CheckpointError
from longarc.models.critic import Critic, build_critic, load_critic
from longarc.models.threads import set_compute_threads
from longarc.pipeline.workspace import load_checkpoint, model_config
from longarc.runs.checkpoint import verify
from longarc.trainer.checkpoint import CRITIC_FILE
from longarc.trainer.critic import CriticSettings
from longarc.trainer.gradients import GradientSource, in_this_process
from longarc.trainer.value_credit import GaeSettings
from longarc.trainer.value_trainer import ValueTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """Everything a critic is made of; plain data, so that another process can build it."""

    config: CriticConfig
    gae: GaeConfig
    checkpoint: str | None
    """Of the stage whose critic goes on; None starts from the policy's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTrainerSpec:
    """Everything the trainer of value pre-training is made of; see ``PolicyTrainerSpec``."""

    input_checkpoint: str
    resume_checkpoint: str | None
    publish_directory: str
    critic: CriticSpec
    num_steps: int
    micro_batch_tokens: int
    num_threads: int
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward."""
    overlong: OverlongConfig | None = None
    """What long rollouts lose of their reward."""


def build_value_trainer(
    spec: ValueTrainerSpec, *, gradients: GradientSource | None = None
) -> ValueTrainer:
    """Load policy and critic, and continue from the stage's own checkpoint if there is one.

    Args:
        spec: what the trainer is made of.
        gradients: as in ``build_policy_trainer``.
    """
    set_compute_threads(spec.num_threads if gradients is None else 1)
    loaded = load_checkpoint(Path(spec.input_checkpoint))
    trainer = ValueTrainer(
        loaded.model,
        critic_of(spec.critic, input_checkpoint=Path(spec.input_checkpoint)),
        critic_settings(
            spec.critic,
            num_steps=spec.num_steps,
            micro_batch_tokens=spec.micro_batch_tokens,
            attention=loaded.attention,
            activations=spec.activations,
        ),
        publish_directory=spec.publish_directory,
        policy_version=loaded.manifest.policy_version,
        overlong=spec.overlong,
        gradients=gradients or in_this_process,
        num_update_threads=spec.num_threads,
    )
    if spec.resume_checkpoint is not None:
        trainer.load(spec.resume_checkpoint)
    return trainer


def critic_of(spec: CriticSpec, *, input_checkpoint: Path) -> Critic:
    """Build a critic from the policy that a stage starts with, or go on with that of an earlier stage.

    Raises:
        CheckpointError: a checkpoint is damaged, or holds no critic of this model.
    """
    if spec.checkpoint is None:
        return Critic(load_checkpoint(input_checkpoint).model)
    start = Path(spec.checkpoint)
    manifest = verify(start)
    if CRITIC_FILE not in manifest.files:
        raise CheckpointError(
            f"{start} has no {CRITIC_FILE}: stage {manifest.stage!r} trained no critic. Name another stage in "
            f"critic.start, or leave it out"
        )
    critic = build_critic(model_config(manifest.model))
    load_critic(critic, start / CRITIC_FILE)
    return critic


def critic_settings(
    spec: CriticSpec,
    *,
    num_steps: int,
    micro_batch_tokens: int,
    attention: Literal["dense", "sparse"],
    activations: ActivationConfig,
) -> CriticSettings:
    """Return how the critic of a stage learns.

    Args:
        spec: what the recipe says.
        num_steps: length of the stage [optimizer steps].
        micro_batch_tokens: tokens in one forward and backward [tokens].
        attention: what the policy does.
        activations: what is kept between forward and backward.
    """
    config, gae = spec.config, spec.gae
    return CriticSettings(
        optimizer=config.optimizer,
        num_steps=num_steps,
        micro_batch_tokens=micro_batch_tokens,
        attention=attention,
        trains=config.trains,
        updates_per_step=config.updates_per_step,
        clip=config.clip,
        gae=GaeSettings(
            gamma=config.gamma,
            alpha=gae.length_alpha,
            lam=gae.lam,
            lambda_scope=gae.lambda_scope,
            bootstraps_truncated=config.bootstraps_truncated,
        ),
        activations=activations,
    )
