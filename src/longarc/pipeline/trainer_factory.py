"""From a stage of a recipe to the trainer behind its rollouts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from longarc.config.critic import CriticConfig, GaeConfig, ValuePretrainConfig
from longarc.config.recipe import Recipe
from longarc.config.rollout import takes_turns
from longarc.config.stages import DistillConfig, RlConfig
from longarc.pipeline.critic_factory import CriticSpec, ValueTrainerSpec, build_value_trainer
from longarc.pipeline.policy_factory import PolicyTrainerSpec, build_policy_trainer
from longarc.trainer.gradients import GradientSource
from longarc.trainer.policy import PolicyTrainer
from longarc.trainer.value_trainer import ValueTrainer

SamplingStage: TypeAlias = RlConfig | DistillConfig | ValuePretrainConfig
"""A stage with a trainer behind its rollouts."""

TrainerSpec: TypeAlias = PolicyTrainerSpec | ValueTrainerSpec
"""Everything a trainer is made of; plain data, so that another process can build it."""


def build_trainer(
    spec: TrainerSpec, *, gradients: GradientSource | None = None
) -> PolicyTrainer | ValueTrainer:
    """Build the trainer of a stage, or let it continue from the stage's own checkpoint.

    Args:
        spec: what the trainer is made of.
        gradients: processes that compute gradients with this one, on one thread each; None computes them
            here, on all threads of the spec.
    """
    if isinstance(spec, ValueTrainerSpec):
        return build_value_trainer(spec, gradients=gradients)
    return build_policy_trainer(spec, gradients=gradients)


def trainer_spec(
    recipe: Recipe,
    config: SamplingStage,
    *,
    input_checkpoint: Path,
    resume_checkpoint: Path | None,
    publish_directory: Path,
    tokenizer: Path | None,
    final: Callable[[str], Path],
) -> TrainerSpec:
    """Return what the trainer of a stage is made of.

    Args:
        recipe: says how many threads there are.
        config: of the stage.
        input_checkpoint: final checkpoint of the stage before.
        resume_checkpoint: newest checkpoint of this stage, if there is one.
        publish_directory: where weights for engines are written.
        tokenizer: the run's; None refuses what was sampled under a JSON schema.
        final: returns the final checkpoint of a stage that this one names: a teacher's or a critic's.
    """
    resumed = None if resume_checkpoint is None else str(resume_checkpoint)
    num_threads = recipe.threads if takes_turns(config) else recipe.trainer_threads
    if isinstance(config, ValuePretrainConfig):
        return ValueTrainerSpec(
            input_checkpoint=str(input_checkpoint),
            resume_checkpoint=resumed,
            publish_directory=str(publish_directory),
            critic=_critic(config.critic, GaeConfig(), final),
            num_steps=config.loop.num_steps,
            micro_batch_tokens=config.micro_batch_tokens,
            num_threads=num_threads,
            activations=config.activations,
            overlong=config.overlong,
        )
    spec = PolicyTrainerSpec(
        input_checkpoint=str(input_checkpoint),
        resume_checkpoint=resumed,
        publish_directory=str(publish_directory),
        optimizer=config.optimizer,
        loss=config.loss,
        num_steps=config.loop.num_steps,
        micro_batch_tokens=config.micro_batch_tokens,
        activations=config.activations,
        temperature=config.rollout.temperature,
        router_bias_rate=0.0,
        routing_replay=config.rollout.routing_replay,
        num_threads=num_threads,
        tokenizer=None if tokenizer is None else str(tokenizer),
    )
    if isinstance(config, DistillConfig):
        teachers = {family: str(final(config.teachers[family])) for family in config.tasks}
        return replace(spec, teachers=teachers)
    return replace(
        spec,
        advantage=config.advantage,
        running_mean_window=config.running_mean_window or spec.running_mean_window,
        overlong=config.overlong,
        router_bias_rate=config.router_bias_rate,
        critic=None
        if config.critic is None
        else _critic(config.critic, config.gae or GaeConfig(), final),
    )


def _critic(config: CriticConfig, gae: GaeConfig, final: Callable[[str], Path]) -> CriticSpec:
    checkpoint = None if config.start is None else str(final(config.start))
    return CriticSpec(config=config, gae=gae, checkpoint=checkpoint)
