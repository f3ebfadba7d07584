"""``config.json`` of Hugging Face to our settings and back."""

from collections.abc import Container, Mapping, Sequence
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
from longarc.config.settings import problems_of, read_strictly
from longarc.config.transformers_model import CLASSES, TransformersConfig
from longarc.errors import ConfigError
from longarc.models.hf_fields import check_numbers, is_said
from longarc.models.hf_llama import LLAMA_TYPES, llama_from_hf, llama_to_hf
from longarc.models.hf_rope import context_of, rope_from_hf, rope_to_hf
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
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "index_share_for_mtp_iteration": True,
}
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
"""Which layers have an indexer, where no list says it."""
_GLM_SAID = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("rms_norm_eps", "max_position_embeddings"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("n_shared_experts", "routed_scaling_factor", "norm_topk_prob"),
    *("index_n_heads", "index_head_dim", "index_topk"),
)
"""What a config.json has to say: our defaults are those of a small model, not what a missing field means."""


_READ: Mapping[str, Container[str]] = {
    "glm_moe_dsa": {*GlmMoeDsaConfig.model_fields, *_GLM_FIXED},
    **dict.fromkeys(LLAMA_TYPES, LlamaConfig.model_fields),
}
"""Fields of a ``config.json`` that are looked at, by ``model_type``; of the others transformers reads what it likes."""


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
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if not isinstance(config, GlmMoeDsaConfig):
        return {**llama_to_hf(config), "dtype": dtype, **no_tokens}
    values = config.model_dump(exclude={"family", "rope_theta", "rope_scaling"})
    values["dtype"] = dtype
    values["rope_parameters"] = rope_to_hf(config.rope_theta, config.rope_scaling)
    values.update(no_tokens)
    values["num_key_value_heads"] = config.num_attention_heads
    values["head_dim"] = config.qk_rope_head_dim
    values["indexer_types"] = list(config.indexer_kinds)
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
    check_numbers(raw, _READ.get(str(model_type)))
    if model_type == "glm_moe_dsa":
        _require(raw, _GLM_FIXED)
        raw = _with_schedule_said_once(_with_leading_dense_layers(raw))
        _require_said(raw, _GLM_SAID)
        # MLA has one key head for all; the field repeats the number of query heads.
        _require(raw, {"num_key_value_heads": raw["num_attention_heads"]})
        return _glm(raw)
    if model_type in LLAMA_TYPES:
        return llama_from_hf(raw)
    if model_type in CLASSES:
        return transformers_from_hf(raw)
    raise ConfigError(
        f"model_type {model_type!r} in config.json is not supported; supported: glm_moe_dsa, "
        f"{', '.join([*LLAMA_TYPES, *CLASSES])}"
    )


def _glm(raw: Mapping[str, Any]) -> GlmMoeDsaConfig:
    names = [name for name in GlmMoeDsaConfig.model_fields if name != "rope_scaling"]
    known = {name: raw[name] for name in names if raw.get(name) is not None}
    known["rope_theta"], known["rope_scaling"] = rope_from_hf(raw)
    longest = known.get("max_position_embeddings")
    if type(longest) is int:
        known["max_position_embeddings"] = context_of(longest, known["rope_scaling"])
    if known["rope_scaling"] is not None:
        known["rope_scaling"] = known["rope_scaling"].model_dump(exclude_none=True)
    try:
        return read_strictly(GlmMoeDsaConfig, known)
    except ValidationError as error:
        raise ConfigError(
            f"config.json does not describe a model that can be built: {problems_of(error)}"
        ) from error


def _require(raw: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    for name, value in fixed.items():
        if name not in ("architectures", "model_type") and not is_said(raw, name, value):
            raise ConfigError(
                f"{name}={raw[name]!r} in config.json is not supported; supported: {value!r}"
            )


def _require_said(raw: Mapping[str, Any], names: Sequence[str]) -> None:
    missing = [name for name in names if raw.get(name) is None]
    if missing:
        raise ConfigError(
            f"config.json does not say {', '.join(missing)}; without that the weights could be computed with "
            f"in several ways. Copy it again from where the weights come from"
        )


def _with_leading_dense_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turn a list of feed-forwards, which goes before the number of dense ones, into that number."""
    types = raw.get("mlp_layer_types")
    if types is None:
        return raw
    num_dense = types.count("dense") if isinstance(types, list) else 0
    num_layers = raw.get("num_hidden_layers")
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or types != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    ):
        raise ConfigError(
            f"mlp_layer_types={types!r} in config.json is not supported; supported: one name for each of the "
            f"{num_layers} layers, first 'dense' and from some layer on 'sparse'"
        )
    return {**raw, "first_k_dense_replace": num_dense}


def _with_schedule_said_once(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop what a list of indexer types, which goes before everything else, says again or overrides.

    transformers writes the list for every model, whatever it was made from.
    """
    types = raw.get("indexer_types")
    if not isinstance(types, list | tuple) or len(types) != raw.get("num_hidden_layers"):
        return raw  # none, or one that the settings refuse
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
