"""Which stages of a recipe can sample with drafts: found out before the stages in front of them have trained for hours."""

from collections.abc import Mapping

from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import AnyEngineConfig, servers_of
from longarc.config.model import GlmHybridConfig, GlmMoeDsaConfig, ModelConfig
from longarc.config.rollout import SamplingStageConfig
from longarc.config.stages import EvalConfig, MidtrainConfig, MtpConfig, StageConfig

_INITIAL = "initial"


def check_can_draft(
    engine: AnyEngineConfig, model: ModelConfig, stages: Mapping[str, StageConfig]
) -> None:
    """Refuse drafts in stages whose model has no MTP layer to make them, or layers that cannot take them back.

    Args:
        engine: of the recipe.
        model: that the first stage begins with.
        stages: of the recipe.

    Raises:
        ValueError: names the stage and what to change.
    """
    if not isinstance(engine, EngineConfig) or not engine.num_speculative_tokens:
        return
    asked = f"engine.num_speculative_tokens={engine.num_speculative_tokens}"
    is_family = can = False
    if isinstance(model, GlmMoeDsaConfig) and not isinstance(model, GlmHybridConfig):
        is_family, can = True, model.num_nextn_predict_layers > 0
    can_at = {_INITIAL: can}
    for name, stage in stages.items():
        if isinstance(stage, MidtrainConfig) and stage.pattern is not None:
            is_family = can = False
        if isinstance(stage, MtpConfig):
            can = is_family
        sampled = [name] if isinstance(stage, SamplingStageConfig) else []
        if servers_of(engine):
            sampled = []  # these draft as they were started
        if isinstance(stage, EvalConfig):
            sampled = stage.stages
        else:
            can_at[name] = can
        lacking = [sampled_name for sampled_name in sampled if not can_at.get(sampled_name, can)]
        if lacking:
            whose = "" if lacking == [name] else f" of {lacking[0]!r}"
            fix = (
                "put an mtp stage before it, set model.num_nextn_predict_layers = 1, or leave it at 0"
                if is_family
                else "leave it at 0: models of this family, or with such a pattern, cannot draft while they sample"
            )
            raise ValueError(
                f"stage {name!r}: {asked}, but the model{whose} has no MTP layer that could draft; {fix}"
            )
