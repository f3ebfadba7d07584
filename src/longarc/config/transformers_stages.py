"""Which options of a stage cannot act on a model whose layers are transformers' own."""

from longarc.config.stages import (
    MidtrainConfig,
    RlConfig,
    SftConfig,
    StageConfig,
    SupervisedConfig,
)
from longarc.config.transformers_model import TransformersConfig


def check_stage(name: str, model: TransformersConfig, stage: StageConfig) -> None:
    """Refuse what would be ignored; defaults pass, because every stage has them.

    Stages and options of sparse attention and of multi-token prediction are refused for every family without.

    Raises:
        ValueError: names the stage, the option and what to change.
    """
    if isinstance(stage, SupervisedConfig) and stage.int4_group_size is not None:
        raise ValueError(
            f"stage {name!r}: int4_group_size={stage.int4_group_size} rounds the routed experts of family "
            f"'glm_moe_dsa' alone, but this is a {model.family} model; leave it out"
        )
    if isinstance(stage, MidtrainConfig) and stage.pattern is not None:
        raise ValueError(
            f"stage {name!r}: pattern.layers={stage.pattern.layers!r} replaces attention, but the layers of a "
            f"{model.family} model are transformers' own; leave pattern out"
        )
    if isinstance(stage, SftConfig):
        for key in ("indexer_loss_coeff", "indexer_stride"):
            _refuse_change(name, model, stage, key, why="no indexers")
    if (
        not model.has_experts
        and isinstance(stage, SupervisedConfig | RlConfig)
        and stage.router_bias_rate
    ):
        _refuse_change(name, model, stage, "router_bias_rate", why="no experts to balance")


def _refuse_change(
    name: str, model: TransformersConfig, stage: StageConfig, key: str, *, why: str
) -> None:
    value, default = getattr(stage, key), type(stage).model_fields[key].default
    if value != default:
        raise ValueError(
            f"stage {name!r}: {key}={value} has no effect, because a {model.family} model has {why}; leave it out"
        )
