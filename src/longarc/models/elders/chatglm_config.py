"""Configs of ChatGLM2, ChatGLM3 and GLM-4-9B, whose code came with the weights, as ``transformers`` reads them.

The target is ``GlmForCausalLM``, whose mathematics is the same. No torch.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from longarc.config.model import MAX_LAYERS
from longarc.config.settings import problems_of, read_strictly
from longarc.errors import ConfigError
from longarc.models.hf_fields import check_numbers

_BASE = 10_000.0
"""Base of the rotary frequencies in the code of all these checkpoints."""

RatioScales = Literal["base", "positions"]
"""What ``rope_ratio`` multiplies or divides, see ``glm_config``."""


class ChatGlmConfig(BaseModel):
    """The fields of a ChatGLM ``config.json`` that decide what the model computes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_type: Literal["chatglm"]
    padded_vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_attention_heads: PositiveInt
    kv_channels: PositiveInt = Field(multiple_of=4)
    """Width of a head; half of it is rotated, in pairs."""
    multi_query_group_num: PositiveInt
    """Key and value heads."""
    ffn_hidden_size: PositiveInt
    seq_length: PositiveInt
    layernorm_epsilon: PositiveFloat
    rope_ratio: PositiveFloat = 1.0
    add_qkv_bias: bool
    tie_word_embeddings: Literal[False] = False
    multi_query_attention: Literal[True]
    rmsnorm: Literal[True]
    post_layer_norm: Literal[True]
    """Whether there is a norm behind the last layer."""
    add_bias_linear: Literal[False]
    apply_residual_connection_post_layernorm: Literal[False]
    pre_seq_len: None = None
    """Length of a trained prefix, which ``transformers`` has no place for."""
    quantization_bit: Literal[0] = 0


def read_chatglm_config(raw: Mapping[str, Any]) -> ChatGlmConfig:
    """Read a ChatGLM ``config.json``.

    Raises:
        ConfigError: it is another model's (the first ChatGLM-6B has other fields), or has a feature that
            ``GlmForCausalLM`` does not compute.
    """
    try:
        read = {name: raw[name] for name in ChatGlmConfig.model_fields if name in raw}
        config = read_strictly(ChatGlmConfig, read)
    except ValidationError as error:
        raise ConfigError(
            f"config.json is not one of ChatGLM2, ChatGLM3 or GLM-4-9B that can be converted: {problems_of(error)}"
        ) from error
    check_numbers(read)
    return config


def glm_config(config: ChatGlmConfig, *, ratio_scales: RatioScales = "base") -> dict[str, Any]:
    """Return the ``config.json`` of the converted model, special tokens excluded.

    Args:
        config: of the checkpoint.
        ratio_scales: what ``rope_ratio`` means, which no field says: ChatGLM3 and GLM-4-9B multiply the
            base by it, ChatGLM2-6B-32K divides positions by it. Of no effect where the ratio is 1.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _BASE * config.rope_ratio}
    if ratio_scales == "positions" and config.rope_ratio != 1:
        rope = {"rope_type": "linear", "rope_theta": _BASE, "factor": config.rope_ratio}
    return {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.multi_query_group_num,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "attention_bias": config.add_qkv_bias,
        "attention_dropout": 0.0,
        "max_position_embeddings": config.seq_length,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_parameters": {**rope, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    }
