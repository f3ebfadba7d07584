"""Builds a policy trainer from plain data, here or in a process of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from longarc.algos.advantages import group_advantages, rloo_advantages
from longarc.algos.protocols import AdvantageFn, PolicyLoss
from longarc.config.load_object import load_object
from longarc.config.rollout import OverlongConfig
from longarc.config.stages import Advantage, LossConfig
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import ContractError
from longarc.models.decoder_base import Decoder
from longarc.models.threads import set_compute_threads
from longarc.pipeline.critic_factory import CriticSpec, critic_of, critic_settings
from longarc.pipeline.workspace import load_checkpoint
from longarc.records.sampling import RoutingReplay
from longarc.tokens.grammar import Grammars
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.baselines import RunningBaselines
from longarc.trainer.gradients import GradientSource, in_this_process
from longarc.trainer.policy import PolicySettings, PolicyTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTrainerSpec:
    """Everything a policy trainer is made of; plain data, so that another process can build it."""

    input_checkpoint: str
    """Final checkpoint of the stage before."""
    resume_checkpoint: str | None
    """Newest checkpoint of this stage; None starts from ``input_checkpoint``."""
    publish_directory: str
    """Where weights for engines are written."""
    optimizer: OptimizerConfig
    loss: LossConfig
    num_steps: int
    micro_batch_tokens: int
    temperature: float
    router_bias_rate: float
    num_threads: int
    advantage: Advantage = "std"
    running_mean_window: int = 128
    """Rewards of each family that the advantage ``running_mean`` compares with [rollouts]."""
    overlong: OverlongConfig | None = None
    """What long rollouts lose of their reward."""
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """What is kept between forward and backward."""
    routing_replay: RoutingReplay = "none"
    """What of the engine's routing is replayed."""
    tokenizer: str | None = None
    """The run's ``tokenizer.json``; None refuses what was sampled under a JSON schema."""
    teachers: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint of each family's teacher; empty where rewards teach."""
    critic: CriticSpec | None = None
    """Of the advantage ``gae``; None for every other."""


def build_policy_trainer(
    spec: PolicyTrainerSpec, *, gradients: GradientSource | None = None
) -> PolicyTrainer:
    """Load weights, teachers and loss, and continue from the stage's own checkpoint if there is one.

    Args:
        spec: what the trainer is made of.
        gradients: processes that compute gradients with this one, on one thread each; None computes them
            here, on all threads of the spec.
    """
    set_compute_threads(spec.num_threads if gradients is None else 1)
    loaded = load_checkpoint(Path(spec.input_checkpoint))
    loss: PolicyLoss = load_object(spec.loss.path, kind=PolicyLoss)
    trainer = PolicyTrainer(
        loaded.model,
        PolicySettings(
            optimizer=spec.optimizer,
            num_steps=spec.num_steps,
            micro_batch_tokens=spec.micro_batch_tokens,
            activations=spec.activations,
            temperature=spec.temperature,
            attention=loaded.attention,
            reduction=spec.loss.reduction,
            loss_settings=spec.loss.settings,
            router_bias_rate=spec.router_bias_rate,
            routing_replay=spec.routing_replay,
            grammars=_grammars(spec.tokenizer, loaded.model),
            normalises_batch=spec.advantage in _NORMALISED,
            overlong=spec.overlong,
            critic=None
            if spec.critic is None
            else critic_settings(
                spec.critic,
                num_steps=spec.num_steps,
                micro_batch_tokens=spec.micro_batch_tokens,
                attention=loaded.attention,
                activations=spec.activations,
            ),
        ),
        loss=loss,
        publish_directory=spec.publish_directory,
        teachers=_teachers(spec.teachers) if spec.teachers else None,
        advantage_fn=baseline(spec)
        if spec.critic is None
        else critic_of(spec.critic, input_checkpoint=Path(spec.input_checkpoint)),
        policy_version=loaded.manifest.policy_version,
        gradients=gradients or in_this_process,
        num_update_threads=spec.num_threads,
    )
    if spec.resume_checkpoint is not None:
        trainer.load(spec.resume_checkpoint)
    return trainer


def _grammars(tokenizer: str | None, model: Decoder) -> Grammars | None:
    if tokenizer is None:
        return None
    return Grammars(Tokenizer.load(tokenizer), vocab_size=model.config.vocab_size)


_NORMALISED: Final = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def baseline(spec: PolicyTrainerSpec) -> AdvantageFn | RunningBaselines:
    """Return what the rewards of a group are compared with."""
    match spec.advantage:
        case "std":
            return group_advantages
        case "mean" | "reinforce_plus_plus_baseline":
            return partial(group_advantages, normalise="mean")
        case "leave_one_out":
            return rloo_advantages
        case "running_mean":
            return RunningBaselines(spec.running_mean_window)
        case "reinforce_plus_plus":
            return _rewards_themselves
        case "gae":
            raise ContractError('the advantage "gae" compares with a critic, not within groups')


def _rewards_themselves(rewards: Sequence[float] | Tensor) -> Tensor:
    """Compare with nobody; the step is normalised as a whole afterwards."""
    return torch.as_tensor(rewards, dtype=torch.float64)


def _teachers(checkpoints: Mapping[str, str]) -> dict[str, Decoder]:
    """Load each teacher once, also where it teaches several families."""
    models = {path: load_checkpoint(Path(path)).model for path in sorted(set(checkpoints.values()))}
    return {family: models[path] for family, path in checkpoints.items()}
