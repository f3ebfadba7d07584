"""``config.json`` of the families that transformers' own classes compute: kept as it is, but for what files decide."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from longarc.config.settings import problems_of
from longarc.config.transformers_model import CLASSES, TransformersConfig
from longarc.errors import ConfigError

_NOT_KEPT = (
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "quantization_config",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
"""What the family, the weights or whoever writes the directory says anew."""


def transformers_to_hf(config: TransformersConfig) -> dict[str, Any]:
    """Return the content of ``config.json``, without the weights' dtype."""
    values: dict[str, Any] = {
        "architectures": [CLASSES[config.family]],
        "model_type": config.family,
    }
    # Without one, some classes take that of their published models, which a small vocabulary lacks.
    values.update({"pad_token_id": None, **config.hf_config})
    if config.has_experts:  # where it is missing, transformers supposes one
        values["num_nextn_predict_layers"] = int(config.carries_mtp)
    return values


def transformers_from_hf(raw: Mapping[str, Any]) -> TransformersConfig:
    """Return our settings for a ``config.json`` of one of these families.

    Raises:
        ConfigError: it is of another class of the family, or has a feature that LongArc does not build.
    """
    family = str(raw["model_type"])
    architectures = raw.get("architectures") or [CLASSES[family]]
    if architectures != [CLASSES[family]]:
        raise ConfigError(
            f"architectures={architectures!r} in config.json is not supported; supported: "
            f"{[CLASSES[family]]!r}, which predicts tokens"
        )
    num_mtp = raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0
    if num_mtp not in (0, 1):
        raise ConfigError(
            f"num_nextn_predict_layers={num_mtp!r} in config.json is not supported; supported: 0 and 1"
        )
    values = {name: value for name, value in raw.items() if name not in _NOT_KEPT}
    try:
        return TransformersConfig.model_validate({"family": family, "hf_config": values})
    except ValidationError as error:
        raise ConfigError(
            f"config.json does not describe a model that can be built: {problems_of(error)}"
        ) from error


def with_mtp_of_files(config: TransformersConfig, *, is_there: bool) -> TransformersConfig:
    """Return the config of a model whose files hold a layer for multi-token prediction, or do not.

    Raises:
        ConfigError: they do, and the family has none.
    """
    if is_there and not config.has_experts:
        raise ConfigError(
            f"the files hold tensors of layer {config.num_hidden_layers}, behind the last of "
            f"num_hidden_layers={config.num_hidden_layers}, but {config.family} models have no layer for "
            f"multi-token prediction; use the config.json that belongs to them"
        )
    return config.model_copy(update={"carries_mtp": is_there})
