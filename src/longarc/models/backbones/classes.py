"""Imports transformers where a model needs it, and builds its classes from our settings."""

import inspect
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from longarc.config.transformers_model import CLASSES, TransformersConfig
from longarc.errors import ConfigError, boundary
from longarc.models.backbones.parts import attend, mix

_OURS: Final = "longarc"
"""Under which transformers knows what we compute inside its layers."""

_UNLISTED: Final = {"rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim"}
"""Names that transformers reads although a class does not list them: the first three go into ``rope_parameters``, the
last is looked for by the layers."""


def transformers_config(config: TransformersConfig) -> Any:
    """Return transformers' own settings of the model; they name our functions for attention and experts.

    Raises:
        ConfigError: transformers is not installed, or refuses the settings.
    """
    transformers = _required(config.family)
    with boundary(ConfigError, f"transformers {transformers.__version__} is too old; install 5.20"):
        _module("transformers.modeling_utils").AttentionInterface.register(_OURS, attend)
        _module("transformers.integrations.moe").ExpertsInterface.register(_OURS, mix)
    # A padding id would keep that row of the embedding from learning; nothing is padded with it here.
    values = {**config.hf_config, "pad_token_id": None}
    with boundary(ConfigError, f"transformers refuses the hf_config of this {config.family} model"):
        settings = transformers.AutoConfig.for_model(config.family, **values)
    settings._attn_implementation = _OURS
    settings._experts_implementation = _OURS
    return settings


def check_all_is_read(config: TransformersConfig) -> None:
    """Refuse names that transformers keeps and never looks at: in a recipe they are misspelt.

    The ``config.json`` of published models have such names too, so this is not for those.

    Raises:
        ConfigError: names them and the nearest that are read; or transformers refuses the settings.
    """
    kind = type(transformers_config(config))
    read = {*inspect.signature(kind).parameters, *kind.attribute_map, *kind.attribute_map.values()}
    read |= _UNLISTED
    unknown = [name for name in config.hf_config if name not in read]
    if not unknown:
        return
    near = get_close_matches(unknown[0], sorted(read), n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"model.hf_config.{unknown[0]}: {hint}{kind.__name__} of transformers does not read "
        f"{', '.join(unknown)}, so the model would be another one than the recipe says; leave out what is not read"
    )


def causal_lm(config: TransformersConfig, settings: Any) -> Any:
    """Build the family's class without memory for its weights.

    Raises:
        ConfigError: transformers is not installed, or cannot build the model.
    """
    transformers = _required(config.family)
    with (
        boundary(ConfigError, f"transformers cannot build this {config.family} model"),
        torch.device("meta"),
    ):
        return getattr(transformers, CLASSES[config.family])(settings)


def rotary_embedding(model: Any, settings: Any) -> nn.Module:
    """Return the model's rotary embedding with its frequencies computed, which are no weights.

    Raises:
        ConfigError: transformers refuses the settings.
    """
    with boundary(ConfigError, "transformers cannot compute the rotary embedding of this model"):
        rotary: nn.Module = type(model.rotary_emb)(config=settings)
    return rotary


def _required(family: str) -> Any:
    try:
        return _module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"a {family} model is computed by transformers, which is not installed ({error}); install the extra "
            f"with: pip install 'longarc[train,hf]'"
        ) from error


def _module(name: str) -> Any:
    """Import by name: transformers takes a second to load, and type checkers minutes to follow."""
    return import_module(name)
