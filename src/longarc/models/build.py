"""Makes a model from its config, with initial weights that depend on the seed alone."""

import torch
from torch import nn

from longarc.config.model import (
    GlmHybridConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    LlamaHybridConfig,
    ModelConfig,
)
from longarc.config.transformers_model import TransformersConfig
from longarc.models.backbones.decoder import build_transformers, transformers_without_memory
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Decoder
from longarc.models.layers import RMSNorm
from longarc.models.llama import Llama
from longarc.models.room import check_room, possible_shapes
from longarc.models.variants.delta import GatedDelta
from longarc.models.variants.hybrid import GlmHybrid, LlamaHybrid


def build_model(config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the model on the CPU and draw its weights: normal matrices, unit norms, zero biases.

    Weights are drawn in fp32 in the order of the parameters and then cast, so that one seed gives one
    model in every dtype. Router biases stay fp32.

    Raises:
        ConfigError: no tensor can have such sizes.
        ResourceError: the memory cannot hold the weights.
    """
    if isinstance(config, TransformersConfig):
        return build_transformers(config, seed=seed, dtype=dtype)
    model = _without_memory(config, dtype)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias":
                    parameter.zero_()
                elif isinstance(module, RMSNorm | nn.LayerNorm):
                    parameter.fill_(1.0)
                else:
                    drawn = torch.empty(parameter.shape, dtype=torch.float32)
                    parameter.copy_(
                        drawn.normal_(std=config.initializer_range, generator=generator)
                    )
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.zeros_like(buffer, dtype=torch.float32))
        for module in model.modules():
            if isinstance(module, GatedDelta):
                module.initialise(generator)
    return model


def build_without_memory(config: ModelConfig) -> Decoder:
    """Return the model on torch's meta device: sizes and names without numbers, if the memory could hold its fp32 weights.

    Raises:
        ConfigError: no tensor can have such sizes, or transformers is not installed or refuses the settings.
        ResourceError: the memory cannot hold the weights.
    """
    if isinstance(config, TransformersConfig):
        return transformers_without_memory(config, torch.float32)
    return _without_memory(config, torch.float32)


def _without_memory(config: GlmMoeDsaConfig | LlamaConfig, dtype: torch.dtype) -> Decoder:
    sizes = config.model_dump()
    with possible_shapes(sizes), torch.device("meta"):
        model = _of_family(config)
    model.to(dtype)
    check_room(model.state_dict(), sizes)
    return model


def _of_family(config: GlmMoeDsaConfig | LlamaConfig) -> Decoder:
    # A hybrid's settings are also those of the family it comes from, so they are looked for first.
    if isinstance(config, GlmHybridConfig):
        return GlmHybrid(config)
    if isinstance(config, LlamaHybridConfig):
        return LlamaHybrid(config)
    return GlmMoeDsa(config) if isinstance(config, GlmMoeDsaConfig) else Llama(config)
