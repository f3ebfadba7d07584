"""``config.json`` of Hugging Face to our settings and back."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from longarc.config.index_share import indexer_kinds
from longarc.config.model import (
    GlmHybridConfig,
    GlmMoeDsaConfig,
    LlamaHybridConfig,
    ModelConfig,
)
from longarc.errors import ConfigError
from longarc.models.hf_llama import LLAMA_TYPES, llama_from_hf, llama_to_hf
from longarc.models.hf_rope import context_of, rope_from_hf, rope_to_hf

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
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if not isinstance(config, GlmMoeDsaConfig):
        return {**llama_to_hf(config), "dtype": dtype, **no_tokens}
    values = config.model_dump(exclude={"family", "rope_theta", "rope_scaling"})
    values["dtype"] = dtype
    values["rope_parameters"] = rope_to_hf(config.rope_theta, config.rope_scaling)
    values.update(no_tokens)
    values["num_key_value_heads"] = config.num_attention_heads
    values["head_dim"] = config.qk_rope_head_dim
    values["indexer_types"] = config.indexer_kinds
    return {**_GLM_FIXED, **values}


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
        return _glm(_with_schedule_said_once(raw))
    if model_type in LLAMA_TYPES:
        return llama_from_hf(raw)
    raise ConfigError(
        f"model_type {model_type!r} in config.json is not supported; supported: glm_moe_dsa, "
        f"{', '.join(LLAMA_TYPES)}"
    )


def _glm(raw: Mapping[str, Any]) -> GlmMoeDsaConfig:
    names = [name for name in GlmMoeDsaConfig.model_fields if name != "rope_scaling"]
    known = {name: raw[name] for name in names if raw.get(name) is not None}
    known["rope_theta"], known["rope_scaling"] = rope_from_hf(raw)
    longest = known.get("max_position_embeddings")
    if isinstance(longest, int):
        known["max_position_embeddings"] = context_of(longest, known["rope_scaling"])
    try:
        return GlmMoeDsaConfig(**known)
    except ValidationError as error:
        raise ConfigError(
            f"config.json does not describe a model that can be built: {error}"
        ) from error


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
