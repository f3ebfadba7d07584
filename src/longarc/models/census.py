"""How large a model is, by arithmetic on its parameters; nothing is allocated."""

from dataclasses import dataclass

import torch

from longarc.config.model import GlmMoeDsaConfig, ModelConfig
from longarc.models.decoder import GlmMoeDsa
from longarc.models.llama import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Parameters of a model, and what a token costs."""

    num_parameters: int
    """All parameters; buffers (router biases) are not counted."""
    num_active_parameters: int
    """Parameters that take part in computing one token: of the routed experts only the chosen ones."""
    num_embedding_parameters: int
    num_cache_values_per_token: int
    """Numbers that one token leaves in the cache, all layers together."""

    @property
    def num_flops_per_token(self) -> int:
        """Forward pass of one token without attention over the context: two per active weight [FLOP]."""
        return 2 * (self.num_active_parameters - self.num_embedding_parameters)


def take_census(config: ModelConfig) -> Census:
    """Count the parameters of a config."""
    with torch.device("meta"):
        model = GlmMoeDsa(config) if isinstance(config, GlmMoeDsaConfig) else Llama(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(sizes.values())
    idle = 0
    if isinstance(config, GlmMoeDsaConfig):
        routed = sum(size for name, size in sizes.items() if ".experts." in name)
        idle = routed - routed * config.num_experts_per_tok // config.n_routed_experts
    return Census(
        num_parameters=total,
        num_active_parameters=total - idle,
        num_embedding_parameters=model.model.embed_tokens.weight.numel(),
        num_cache_values_per_token=sum(model.cache_widths().values()) * config.num_hidden_layers,
    )
