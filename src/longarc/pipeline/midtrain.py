"""Stage ``midtrain``: the same model on longer contexts, with a raised RoPE base."""

from dataclasses import replace

from longarc.config.stages import MidtrainConfig
from longarc.config.transformers_model import TransformersConfig
from longarc.models.build import build_model
from longarc.models.conversion import to_hybrid
from longarc.models.decoder_base import Decoder
from longarc.pipeline.demonstrations import text_and_demonstrations
from longarc.pipeline.supervised import base_settings, drafts_along, train_supervised
from longarc.pipeline.workspace import Workspace


async def run(workspace: Workspace, stage: str, config: MidtrainConfig) -> None:
    """Continue next-token prediction on documents that need their whole length, with new attention where asked."""
    loaded = workspace.load(workspace.input_checkpoint(stage))
    seed = workspace.recipe.seed + 1
    model = with_rope_theta(loaded.model, config.rope_theta)
    if config.pattern is not None:
        model = to_hybrid(model, config.pattern, seed=seed)
    await train_supervised(
        workspace,
        stage=stage,
        config=config,
        settings=replace(
            base_settings(config),
            attention=loaded.attention if config.pattern is None else "dense",
            drafts=drafts_along(config.mtp),
        ),
        model=model,
        policy_version=loaded.manifest.policy_version,
        documents=text_and_demonstrations(workspace, stage, config, seed=seed),
    )


def with_rope_theta(model: Decoder, rope_theta: float | None) -> Decoder:
    """Return a model of the same weights with another RoPE base."""
    if rope_theta is None or rope_theta == model.config.rope_theta:
        return model
    config = (
        model.config.with_rope_theta(rope_theta)
        if isinstance(model.config, TransformersConfig)
        else model.config.model_copy(update={"rope_theta": rope_theta})
    )
    raised = build_model(config, seed=0)
    raised.load_state_dict(model.state_dict())
    return raised
