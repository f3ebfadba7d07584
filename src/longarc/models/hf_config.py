"""``config.json`` of Hugging Face to our settings and back."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from longarc.config.index_share import indexer_kinds
from longarc.config.model import (
    GlmHybridConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    LlamaHybridConfig,
    ModelConfig,
)
from longarc.config.transformers_model import CLASSES, TransformersConfig
from longarc.errors import ConfigError
from longarc.models.hf_transformers import transformers_from_hf, transformers_to_hf

_GLM_FIXED: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "index_share_for_mtp_iteration": True,
}
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
"""Which layers have an indexer, where no list says it."""
_LLAMA_FIXED: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def config_to_hf(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json`` for ``transformers``.

    Raises:
        ConfigError: transformers has no such architecture.
    """
    if isinstance(config, GlmHybridConfig | LlamaHybridConfig):
        raise ConfigError(
            f"a {config.family} model has no Hugging Face architecture: pattern.layers="
            f"{config.pattern.layers!r} mixes attention in a way that transformers does not build; "
            f"keep it as a checkpoint of LongArc"
        )
    if isinstance(config, TransformersConfig):
        return {**transformers_to_hf(config), "dtype": dtype}
    values = config.model_dump(exclude={"family", "rope_theta"})
    values["dtype"] = dtype
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    values.update(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if isinstance(config, GlmMoeDsaConfig):
        values["num_key_value_heads"] = config.num_attention_heads
        values["head_dim"] = config.qk_rope_head_dim
        values["indexer_types"] = config.indexer_kinds
        return {**_GLM_FIXED, **values}
    values["head_dim"] = config.head_dim or config.hidden_size // config.num_attention_heads
    return {**_LLAMA_FIXED, **values}


def without_mtp(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model without a layer for multi-token prediction."""
    if not isinstance(config, GlmMoeDsaConfig):
        return config
    return config.model_copy(update={"num_nextn_predict_layers": 0})


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Return our settings for a Hugging Face config.

    Raises:
        ConfigError: another architecture, or a feature LongArc does not build.
    """
    model_type = raw.get("model_type")
    if model_type == "glm_moe_dsa":
        _require(raw, _GLM_FIXED)
        return _parse(GlmMoeDsaConfig, _with_schedule_said_once(raw))
    if model_type == "llama":
        _require(raw, _LLAMA_FIXED)
        return _parse(LlamaConfig, raw)
    if model_type in CLASSES:
        return transformers_from_hf(raw)
    raise ConfigError(
        f"model_type {model_type!r} in config.json is not supported; supported: glm_moe_dsa, llama, "
        f"{', '.join(CLASSES)}"
    )


def _parse(
    settings: type[GlmMoeDsaConfig] | type[LlamaConfig], raw: Mapping[str, Any]
) -> ModelConfig:
    known = {name: raw[name] for name in settings.model_fields if raw.get(name) is not None}
    known["rope_theta"] = _rope_theta(raw)
    if settings is LlamaConfig and known.get("head_dim") == _even_head_dim(raw):
        del known["head_dim"]
    try:
        return settings(**known)
    except ValidationError as error:
        raise ConfigError(
            f"config.json does not describe a model that can be built: {error}"
        ) from error


def _even_head_dim(raw: Mapping[str, Any]) -> int | None:
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _rope_theta(raw: Mapping[str, Any]) -> object:
    """Return what the settings then check to be a number."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError(
            f"rope_parameters={rope!r} in config.json is no object; write it as in "
            f'{{"rope_type": "default", "rope_theta": 10000.0}}'
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"rope_type {kind!r} in config.json is not supported; supported: 'default'. Scaled rotary "
            f"embeddings would give other numbers"
        )
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError("config.json names no rope_theta; add rope_parameters.rope_theta")
    return theta


def _require(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for name, value in fixed.items():
        if name not in ("architectures", "model_type") and raw.get(name, value) != value:
            raise ConfigError(
                f"{name}={raw[name]!r} in config.json is not supported; supported: {value!r}"
            )


def _with_schedule_said_once(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop what a list of indexer types, which goes before everything else, says again or overrides.

    transformers writes the list for every model, whatever it was made from.
    """
    types = raw.get("indexer_types")
    if types is None:
        return raw
    schedule = {name: raw[name] for name in _SCHEDULE if raw.get(name) is not None}
    try:
        said = indexer_kinds(
            raw["num_hidden_layers"],
            frequency=schedule.get("index_topk_freq", 1),
            offset=schedule.get("index_skip_topk_offset", 2),
            pattern=schedule.get("index_topk_pattern"),
        )
        repeated = said == tuple(types)
    except (TypeError, KeyError, ZeroDivisionError):
        return raw  # which the settings refuse, naming the field
    dropped = ("indexer_types",) if repeated else _SCHEDULE
    return {name: value for name, value in raw.items() if name not in dropped}
