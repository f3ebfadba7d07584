"""Stage ``dsa``: from dense to sparse attention.

First only the indexer learns, to point where dense attention looks (``warmup_steps``); then the whole
model trains on the keys that the indexer selects, and the indexer goes on learning from those
(``num_steps``). Layers may share indexers from here on (IndexShare): an indexer then learns from the
attention of all layers that use its selection. Source: GLM-5 report (arXiv:2602.15763), section 2.1.1.
"""

from dataclasses import replace

from longarc.config.coherence import check_is_sparse
from longarc.config.index_share import kinds_of
from longarc.config.stages import DsaConfig
from longarc.errors import ConfigError
from longarc.models.index_share import with_shared_indexers
from longarc.pipeline.demonstrations import text_and_demonstrations
from longarc.pipeline.supervised import base_settings, drafts_along, train_supervised
from longarc.pipeline.workspace import Workspace
from longarc.runs.checkpoint import read_manifest
from longarc.trainer.supervised import SupervisedSettings


async def run(workspace: Workspace, stage: str, config: DsaConfig) -> None:
    """Warm the indexer up, then train sparsely.

    Raises:
        ConfigError: the model has no indexer, it would select every key, or its indexers do not fit the pattern.
    """
    loaded = workspace.load(workspace.input_checkpoint(stage))
    try:
        check_is_sparse(loaded.model.config, config.context_tokens)
    except ValueError as error:
        raise ConfigError(f"stage {stage!r}: {error}") from error
    model = loaded.model
    if config.index_topk_pattern is not None:
        model = with_shared_indexers(model, kinds_of(config.index_topk_pattern))
    seed = workspace.recipe.seed + 2
    documents = text_and_demonstrations(workspace, stage, config, seed=seed)
    version = loaded.manifest.policy_version
    resumed = workspace.run.stage(stage).latest()
    if resumed is None or read_manifest(resumed).step <= config.warmup_steps:
        version = await train_supervised(
            workspace,
            stage=stage,
            config=config,
            settings=warmup_settings(config),
            model=model,
            policy_version=version,
            documents=documents,
            is_last_phase=False,
        )
    await train_supervised(
        workspace,
        stage=stage,
        config=config,
        settings=sparse_settings(config),
        model=model,
        policy_version=version,
        documents=lambda step: documents(config.warmup_steps + step),
        first_step=config.warmup_steps,
    )


def warmup_settings(config: DsaConfig) -> SupervisedSettings:
    """Return how the first phase trains: the indexer alone, at a constant rate of its own."""
    rate = {"lr": config.warmup_lr, "schedule": "constant", "weight_decay": 0.0}
    return replace(
        base_settings(config),
        optimizer=config.optimizer.model_copy(update=rate),
        num_steps=config.warmup_steps,
        mode="indexer_warmup",
        attention="dense",
        router_bias_rate=0.0,
    )


def sparse_settings(config: DsaConfig) -> SupervisedSettings:
    """Return how the second phase trains: everything, on the selected keys."""
    return replace(
        base_settings(config),
        attention="sparse",
        indexer_loss_coeff=config.indexer_loss_coeff,
        drafts=drafts_along(config.mtp),
    )
