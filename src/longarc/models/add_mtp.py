"""Gives a finished model a layer for multi-token prediction, or another number of depths."""

from typing import Literal

import torch

from longarc.config.model import MAX_DEPTHS, GlmMoeDsaConfig
from longarc.errors import ConfigError
from longarc.models.build import build_model
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Decoder
from longarc.models.mtp import MultiTokenPredictor


def with_mtp(
    model: Decoder,
    *,
    num_depths: int | None = None,
    start: Literal["last_layer", "random"] = "last_layer",
    seed: int,
) -> GlmMoeDsa:
    """Return the model with an MTP layer: its own where it has one, a new one otherwise.

    Args:
        model: its weights are copied where a new model is built.
        num_depths: tokens to draft one after another; None keeps what the config says.
        start: weights of a new layer: those of the last decoder layer that fit, or random ones.
        seed: of the random ones.

    Raises:
        ConfigError: the model is of a family without MTP, or cannot have as many depths.
    """
    if not isinstance(model, GlmMoeDsa):
        raise ConfigError(
            f"a {model.config.family} model has no layer for multi-token prediction; use a model of family "
            f"'glm_moe_dsa'"
        )
    config = model.config
    depths = config.mtp_num_depths if num_depths is None else num_depths
    if not 1 <= depths <= MAX_DEPTHS:
        raise ConfigError(f"num_depths={depths} is not possible; draft 1 to {MAX_DEPTHS} tokens")
    if model.mtp is not None and depths == config.mtp_num_depths:
        return model
    wanted = config.model_copy(update={"num_nextn_predict_layers": 1, "mtp_num_depths": depths})
    built = build_model(wanted, seed=seed, dtype=model.output_weight.dtype)
    assert isinstance(built, GlmMoeDsa)
    assert built.mtp is not None
    built.load_state_dict(model.state_dict(), strict=model.mtp is not None)
    if model.mtp is None and start == "last_layer":
        _copy_last_layer(built, built.mtp, wanted)
    return built


@torch.no_grad()
def _copy_last_layer(model: GlmMoeDsa, mtp: MultiTokenPredictor, config: GlmMoeDsaConfig) -> None:
    """Take each tensor from the last layer that has one of this name and shape."""
    layers = [model.model.layers[i].state_dict() for i in reversed(range(config.num_hidden_layers))]
    for name, tensor in mtp.state_dict().items():
        for layer in layers:
            if name in layer and layer[name].shape == tensor.shape:
                tensor.copy_(layer[name])
                break
