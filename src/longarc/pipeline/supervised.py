"""The loop that pretrain, midtrain, dsa, sft and mtp share: documents in, checkpoints out, exactly resumable.

A stage is a pure function of its input checkpoint and of ``documents(step)``: nothing is drawn from a
stream that a crash could lose, so a resumed run ends bit-identical to one that never stopped.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from longarc.config.stages import MtpAlongConfig, SupervisedConfig
from longarc.errors import ConfigError
from longarc.models.decoder_base import Decoder
from longarc.models.threads import set_compute_threads
from longarc.pipeline.workspace import Attention, Workspace
from longarc.records.metric import Metric
from longarc.trainer.draft_objective import DraftObjective
from longarc.trainer.packing import Document
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer

Documents = Callable[[int], Sequence[Document]]
"""Gives the documents of a 0-based step; the same step always gives the same documents."""


async def train_supervised(
    workspace: Workspace,
    *,
    stage: str,
    config: SupervisedConfig,
    settings: SupervisedSettings,
    model: Decoder,
    policy_version: int,
    documents: Documents,
    first_step: int = 0,
    is_last_phase: bool = True,
) -> int:
    """Train until ``settings.num_steps`` of this phase are done; return the policy version reached.

    Args:
        workspace: the run.
        stage: name of the stage.
        config: how often to save.
        settings: how to train.
        model: is trained in place; holds the stage's input weights.
        policy_version: optimizer steps already in those weights.
        documents: the data of each step of this phase.
        first_step: steps of earlier phases of this stage [optimizer steps].
        is_last_phase: whether the stage is finished afterwards.

    Raises:
        ConfigError: drafts are to be trained along, and the model has no layer for them.
    """
    if settings.drafts is not None and not getattr(model.config, "num_nextn_predict_layers", 0):
        raise ConfigError(
            f"stage {stage!r}: mtp trains a layer that the weights before it do not have; put an mtp stage "
            f"before it, or leave mtp out"
        )
    set_compute_threads(1)  # each core has a process
    trainer = SupervisedTrainer(
        model,
        settings,
        policy_version=policy_version,
        gradients=workspace.gradients.open,
        num_update_threads=workspace.recipe.threads,
    )
    directory = workspace.run.stage(stage)
    writer = directory.writer(keep_last=2)
    resumed = directory.latest()
    last_step = first_step + settings.num_steps
    if resumed is not None and _step_of(resumed) > first_step:
        trainer.load(str(resumed))
    attention: Attention = settings.attention
    while trainer.step_index < settings.num_steps:
        step = trainer.step_index
        started_s = time.perf_counter()
        batch = documents(step)
        data_s = time.perf_counter() - started_s
        report = trainer.step(batch)
        workspace.record(
            stage,
            first_step + step + 1,
            config_total(config),
            [*report.metrics, Metric("train/data_s", data_s)],
        )
        total = first_step + trainer.step_index
        is_done = total == last_step
        if is_done or total % config.checkpoint_every_steps == 0 or workspace.stop.is_set():
            fields = workspace.manifest_fields(
                stage=stage,
                step=total,
                policy_version=trainer.policy_version,
                model=model,
                attention=attention,
            )
            writer.write(lambda p: trainer.save(str(p)), **fields)  # type: ignore[arg-type]
        # Signals are handled by the event loop, so it gets a turn between steps.
        await asyncio.sleep(0)
        workspace.check_stop()
    if is_last_phase:
        directory.set_final(writer.path(last_step))
    return trainer.policy_version


def base_settings(config: SupervisedConfig) -> SupervisedSettings:
    """Return what every stage takes from its recipe as it is; a stage replaces the rest."""
    return SupervisedSettings(
        optimizer=config.optimizer,
        num_steps=config.num_steps,
        micro_batch_tokens=config.micro_batch_tokens,
        int4_group_size=config.int4_group_size,
        activations=config.activations,
        router_bias_rate=config.router_bias_rate,
    )


def drafts_along(config: MtpAlongConfig | None) -> DraftObjective | None:
    """Return how a stage trains drafts along, if it does."""
    if config is None:
        return None
    return DraftObjective(loss=config.loss, weight=config.weight, trains_trunk=config.trains_trunk)


def config_total(config: SupervisedConfig) -> int:
    """Return all optimizer steps of a stage, a warm-up phase included."""
    return config.num_steps + int(getattr(config, "warmup_steps", 0))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
