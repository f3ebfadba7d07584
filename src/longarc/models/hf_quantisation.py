"""What a ``config.json`` says about numbers of its weights that are stored in few bits; nothing is read here.

Apart from the forms themselves, so that a config can be judged without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longarc.errors import ConfigError, boundary


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What ``quantization_config`` of a ``config.json`` says about the files."""

    block: tuple[int, int] | None = None
    """Rows and columns that share an FP8 scale; None where nothing is FP8."""
    group_size: int | None = None
    """Numbers that share an INT4 scale; None where nothing is INT4."""


def quantisation_to_hf(group_size: int) -> dict[str, Any]:
    """Return the ``quantization_config`` of INT4 experts, as vLLM and transformers read it."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*eh_proj.*",
            r"re:.*mlp\.gate$",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }


def quantisation_from_hf(raw: Mapping[str, Any]) -> Quantisation:
    """Return what a ``config.json`` says about how its weights are stored.

    Raises:
        ConfigError: they are stored in a way that cannot be read.
    """
    config = raw.get("quantization_config")
    if config is None:
        return Quantisation()
    hint = "copy config.json again from where the weights come from"
    with boundary(ConfigError, f"quantization_config in config.json is damaged; {hint}"):
        method = config.get("quant_method")
        return _fp8_from_hf(config) if method == "fp8" else _int4_from_hf(method, config)


def _fp8_from_hf(config: Mapping[str, Any]) -> Quantisation:
    block = config.get("weight_block_size")
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        return Quantisation(block=(block[0], block[1]))
    raise ConfigError(
        f"weight_block_size={block!r} in config.json is not supported; supported: two positive numbers, as in "
        f"[128, 128]"
    )


def _int4_from_hf(method: object, config: Mapping[str, Any]) -> Quantisation:
    groups = config.get("config_groups") or {}
    first: Mapping[str, Any] = next(iter(groups.values()), {})
    weights: Mapping[str, Any] = first.get("weights") or {}
    wanted = quantisation_to_hf(int(weights.get("group_size") or 0))
    expected = wanted["config_groups"]["group_0"]["weights"]
    if (
        method == "compressed-tensors"
        and config.get("format") == "pack-quantized"
        and len(groups) == 1
        and all(weights.get(key, value) == value for key, value in expected.items())
        and expected["group_size"] > 0
    ):
        return Quantisation(group_size=expected["group_size"])
    raise ConfigError(
        f"quantization_config of method {method!r} with weights {weights} in config.json is not supported; "
        f"supported: fp8 with weight_block_size, and compressed-tensors pack-quantized with one group of "
        f"4-bit symmetric integers in groups"
    )
