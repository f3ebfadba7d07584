"""``config.json`` of the Llama-type families: Llama (SmolLM2 among them), Qwen2 and Qwen3.

==========  =====================  ===========  ============================
model_type  ``attention_bias``     ``qk_norm``  where it says so in the file
==========  =====================  ===========  ============================
llama       none or all            no           ``attention_bias``
qwen2       inputs                 no           nowhere: all Qwen2 have them
qwen3       none or all            yes          ``attention_bias``
==========  =====================  ===========  ============================
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from longarc.config.model import LlamaConfig
from longarc.config.settings import problems_of, read_strictly
from longarc.errors import ConfigError
from longarc.models.hf_fields import is_said
from longarc.models.hf_rope import context_of, rope_from_hf, rope_to_hf

LlamaType: TypeAlias = Literal["llama", "qwen2", "qwen3"]

LLAMA_TYPES: tuple[LlamaType, ...] = ("llama", "qwen2", "qwen3")

_ARCHITECTURES: Mapping[LlamaType, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "mlp_bias": False}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
"""Without these a file describes no model; our own defaults are those of another one."""
_THETA = 1e4
"""What transformers takes where a file names no base, as those of the first Llamas."""
_SAME = (*_REQUIRED, "tie_word_embeddings", "initializer_range")


def llama_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return what ``config.json`` says of the model.

    Raises:
        ConfigError: transformers has no such architecture.
    """
    model_type = llama_type(config)
    values = {name: getattr(config, name) for name in _SAME}
    values |= {
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope_to_hf(config.rope_theta, config.rope_scaling),
    }
    if model_type == "llama":
        values |= _FIXED
    else:
        values |= {"hidden_act": "silu", "use_sliding_window": False}
    if model_type != "qwen2":
        values["attention_bias"] = config.attention_bias == "all"
    return {"architectures": [_ARCHITECTURES[model_type]], "model_type": model_type, **values}


def llama_type(config: LlamaConfig) -> LlamaType:
    """Return the name under which transformers knows a model of this kind.

    Raises:
        ConfigError: it knows none.
    """
    if config.qk_norm and config.attention_bias == "inputs":
        raise ConfigError(
            'qk_norm=True with attention_bias="inputs" has no Hugging Face architecture: Qwen3 has biases on all '
            "four projections or on none; keep it as a checkpoint of LongArc"
        )
    if config.qk_norm:
        return "qwen3"
    return "qwen2" if config.attention_bias == "inputs" else "llama"


def llama_from_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """Return our settings for a ``config.json`` of one of these families; what it leaves out is as in transformers.

    Raises:
        ConfigError: a field is missing or wrong, or asks for something that LongArc does not build.
    """
    model_type: LlamaType = raw["model_type"]
    _refuse_other_parts(raw)
    _refuse_windows(raw)
    missing = [name for name in _needed(model_type) if raw.get(name) is None]
    if missing:
        raise ConfigError(
            f"config.json of a {model_type} model names no {', '.join(missing)}; copy it again from where the "
            f"weights come from"
        )
    theta, scaling = rope_from_hf(raw, default_theta=_THETA)
    known = {name: raw[name] for name in _SAME if raw.get(name) is not None}
    heads = raw["num_attention_heads"]
    known |= {
        "num_key_value_heads": _stated(raw, "num_key_value_heads", heads),
        "rms_norm_eps": _stated(raw, "rms_norm_eps", 1e-6),
        "head_dim": _head_dim(raw, model_type),
        "attention_bias": _biases(raw, model_type),
        "qk_norm": model_type == "qwen3",
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
    }
    longest = _stated(raw, "max_position_embeddings", 2048 if model_type == "llama" else 32768)
    known["max_position_embeddings"] = (
        context_of(longest, scaling) if type(longest) is int else longest
    )
    try:
        return read_strictly(LlamaConfig, known)
    except ValidationError as error:
        raise ConfigError(
            f"config.json does not describe a model that can be built: {problems_of(error)}"
        ) from error


def _needed(model_type: LlamaType) -> tuple[str, ...]:
    # Qwen's classes have a number of their own for key heads that a file leaves out, which no checkpoint means.
    return _REQUIRED if model_type == "llama" else (*_REQUIRED, "num_key_value_heads")


def _stated(raw: Mapping[str, Any], name: str, default: object) -> Any:
    return default if raw.get(name) is None else raw[name]


def _head_dim(raw: Mapping[str, Any], model_type: LlamaType) -> Any:
    """Return the width of a head; None where it is the width of the model shared out among them."""
    stated = _stated(raw, "head_dim", 128 if model_type == "qwen3" else None)
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if not all(type(size) is int for size in (stated, hidden, heads)):
        return stated  # which the settings refuse where it is wrong
    return None if stated * heads == hidden else stated


def _biases(raw: Mapping[str, Any], model_type: LlamaType) -> str:
    if model_type == "qwen2":
        return "inputs"
    said = raw.get("attention_bias")
    if said is not None and not isinstance(said, bool):
        raise ConfigError(
            f"attention_bias={said!r} in config.json is no boolean; write true or false"
        )
    return "all" if said else "none"


def _refuse_other_parts(raw: Mapping[str, Any]) -> None:
    for name, value in _FIXED.items():
        if not is_said(raw, name, value):
            raise ConfigError(
                f"{name}={raw[name]!r} in config.json is not supported; supported: {value!r}"
            )


def _refuse_windows(raw: Mapping[str, Any]) -> None:
    """Refuse layers that attend to a sliding window, which a plain decoder would read past."""
    kinds = raw.get("layer_types")
    if kinds is None:
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        first = raw.get("max_window_layers", 28)
        layers = raw.get("num_hidden_layers")
        if window is None or (
            isinstance(layers, int) and isinstance(first, int) and first >= layers
        ):
            return
        asked = f"use_sliding_window=true with sliding_window={window}, max_window_layers={first}"
    else:
        others = sorted({str(kind) for kind in kinds} - {"full_attention"})
        if not others:
            return
        asked = f"layer_types with {', '.join(others)}"
    raise ConfigError(
        f"{asked} in config.json is not supported; supported: full attention in every layer. Without the window "
        f"the numbers would differ as soon as a sequence is longer; use a checkpoint without it"
    )
