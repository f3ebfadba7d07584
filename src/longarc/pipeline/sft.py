"""Stage ``sft``: imitate experts; their mistakes stay in context and are not imitated."""

from dataclasses import replace

from longarc.config.stages import SftConfig
from longarc.pipeline.demonstrations import StepConversations, experts_of, num_shown_before
from longarc.pipeline.supervised import base_settings, drafts_along, train_supervised
from longarc.pipeline.workspace import Workspace


async def run(workspace: Workspace, stage: str, config: SftConfig) -> None:
    """Train on demonstrations of every family in its share."""
    loaded = workspace.load(workspace.input_checkpoint(stage))
    is_sparse = loaded.attention == "sparse"
    await train_supervised(
        workspace,
        stage=stage,
        config=config,
        settings=replace(
            base_settings(config),
            attention=loaded.attention,
            indexer_loss_coeff=config.indexer_loss_coeff if is_sparse else 0.0,
            indexer_stride=config.indexer_stride,
            drafts=drafts_along(config.mtp),
        ),
        model=loaded.model,
        policy_version=loaded.manifest.policy_version,
        documents=StepConversations(
            experts_of(workspace, stage, config.tasks),
            workspace.chat_format(),
            conversations_per_step=config.conversations_per_step,
            error_frac=config.error_frac,
            max_tokens=config.micro_batch_tokens,
            first=num_shown_before(workspace.recipe, stage),
            seed=workspace.recipe.seed,
        ),
    )
