"""Stage ``mtp``: draft depths for a finished model, which stays as it is bit for bit.

Source: GLM-5 report (arXiv:2602.15763), section 2.1; the TV losses: Bebop (arXiv:2606.12370), used by GLM-5.2.
"""

from dataclasses import replace

from longarc.config.stages import MtpConfig
from longarc.models.add_mtp import with_mtp
from longarc.pipeline.demonstrations import text_and_demonstrations
from longarc.pipeline.supervised import base_settings, train_supervised
from longarc.pipeline.workspace import Attention, Workspace
from longarc.trainer.draft_objective import DraftObjective
from longarc.trainer.supervised import SupervisedSettings


async def run(workspace: Workspace, stage: str, config: MtpConfig) -> None:
    """Train the MTP layer, which is added to a checkpoint without one, and nothing else.

    Raises:
        ConfigError: the model is of a family without MTP.
    """
    loaded = workspace.load(workspace.input_checkpoint(stage))
    seed = workspace.recipe.seed + 3
    await train_supervised(
        workspace,
        stage=stage,
        config=config,
        settings=settings_of(config, attention=loaded.attention),
        model=with_mtp(loaded.model, num_depths=config.num_depths, start=config.start, seed=seed),
        policy_version=loaded.manifest.policy_version,
        documents=text_and_demonstrations(workspace, stage, config, seed=seed),
    )


def settings_of(config: MtpConfig, *, attention: Attention) -> SupervisedSettings:
    """Return how the stage trains a model that attends like this."""
    return replace(
        base_settings(config),
        mode="mtp",
        attention=attention,
        indexer_loss_coeff=config.indexer_loss_coeff,
        indexer_stride=config.indexer_stride,
        drafts=DraftObjective(loss=config.loss, cross_entropy_steps=config.cross_entropy_steps),
    )
