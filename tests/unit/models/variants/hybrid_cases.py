"""Small hybrids whose every part does something."""

import torch

from longarc.config.model import AttentionPattern
from longarc.models.build import build_model
from longarc.models.conversion import hybrid_config
from longarc.models.decoder_base import Decoder
from model_cases import sharpened, small_glm, small_llama

PATTERN = "FSGD"


def hybrid(base: str, layers: str, **pattern) -> Decoder:
    settings = {"window": 9, "chunk_tokens": 8} | pattern
    small = small_glm if base == "glm" else small_llama
    config = small(num_hidden_layers=len(layers))
    model = build_model(hybrid_config(config, AttentionPattern(layers=layers, **settings)), seed=3)
    return spread(model)


def spread(model: Decoder) -> Decoder:
    """Sharpen the weights, and let convolutions and gates do something."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        sharpened(model)
        for name, parameter in model.named_parameters():
            if name.endswith("conv_weight"):
                parameter.normal_(std=0.5, generator=generator)
            if name.endswith(("a_log", "dt_bias")):
                parameter.uniform_(-1, 0.5, generator=generator)
    return model
