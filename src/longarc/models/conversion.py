"""A finished model with other attention in some of its layers: old weights where they fit, new ones where not."""

from longarc.config.model import (
    AttentionPattern,
    GlmHybridConfig,
    GlmMoeDsaConfig,
    HybridConfig,
    LlamaConfig,
    LlamaHybridConfig,
    ModelConfig,
)
from longarc.config.transformers_model import TransformersConfig
from longarc.errors import ConfigError
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder


def hybrid_config(config: ModelConfig, pattern: AttentionPattern) -> HybridConfig:
    """Return the settings of the hybrid; a hybrid can be converted again.

    Raises:
        ConfigError: the model is computed by transformers' layers, which no pattern replaces.
        ValidationError: the pattern does not name every layer.
    """
    if isinstance(config, TransformersConfig):
        raise ConfigError(
            f"pattern={pattern.layers!r} replaces attention, but the layers of a {config.family} model are "
            f"transformers' own; leave pattern out, or use model.family = 'glm_moe_dsa' or 'llama'"
        )
    if isinstance(config, LlamaConfig) and config.compute_dtype != "float32":
        raise ConfigError(
            f"pattern={pattern.layers!r} makes a hybrid, which computes in float32, but the model has compute_dtype="
            f"{config.compute_dtype!r}; set it to 'float32'"
        )
    values = config.model_dump(exclude={"family", "pattern"})
    settings = GlmHybridConfig if isinstance(config, GlmMoeDsaConfig) else LlamaHybridConfig
    return settings.model_validate({**values, "pattern": pattern})


def to_hybrid(model: Decoder, pattern: AttentionPattern, *, seed: int = 0) -> Decoder:
    """Return a new model with the pattern's attention, and copies of all weights that it shares with ``model``.

    Projections of queries, keys, values and output keep their weights in every kind of layer. Only Gated
    DeltaNet brings parameters of its own; they are drawn from ``seed``, or copied where the model has them
    already. Indexers are left out, that of an MTP layer too.
    """
    config = hybrid_config(model.config, pattern)
    hybrid = build_model(config, seed=seed, dtype=model.output_weight.dtype)
    given = model.state_dict()
    shared = {name: given[name] for name in hybrid.state_dict() if name in given}
    hybrid.load_state_dict(shared, strict=False)
    return hybrid


def num_new_parameters(model: Decoder) -> int:
    """Count the parameters that no attention layer has."""
    return sum(p.numel() for name, p in model.named_parameters() if "delta" in name.split("."))
