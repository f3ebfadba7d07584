"""Whether the cache of a recipe's models can be rounded: found out before the first stage."""

from collections.abc import Mapping

from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import AnyEngineConfig
from longarc.config.model import (
    GlmHybridConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    LlamaHybridConfig,
    ModelConfig,
)
from longarc.config.stages import MidtrainConfig, StageConfig


def check_can_round_cache(
    engine: AnyEngineConfig, model: ModelConfig, stages: Mapping[str, StageConfig]
) -> None:
    """Refuse ``engine.cache_quantisation`` for models of which nobody says how their cache would be rounded.

    Args:
        engine: of the recipe.
        model: that the first stage begins with.
        stages: of the recipe.

    Raises:
        ValueError: names the model or the stage, and what to change.
    """
    if not isinstance(engine, EngineConfig) or engine.cache_quantisation == "none":
        return
    asked = f"engine.cache_quantisation={engine.cache_quantisation!r}"
    fix = "leave it at 'none', or take weight_quantisation, which rounds weights alone"
    is_hybrid = isinstance(model, GlmHybridConfig | LlamaHybridConfig)
    if is_hybrid or not isinstance(model, GlmMoeDsaConfig | LlamaConfig):
        raise ValueError(f"{asked}: the cache of a {model.family} model is not rounded; {fix}")
    for name, stage in stages.items():
        if isinstance(stage, MidtrainConfig) and stage.pattern is not None:
            raise ValueError(
                f"{asked}: stage {name!r} gives the layers a pattern, and the cache of such a model is not "
                f"rounded; {fix}"
            )
