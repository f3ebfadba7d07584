"""Small models for tests: shapes that differ from one another, and weights far from uniform."""

import torch

from longarc.config.model import GlmMoeDsaConfig, LlamaConfig
from longarc.models.decoder_base import Decoder


def small_glm(**changes) -> GlmMoeDsaConfig:
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 12,
        "max_position_embeddings": 256,
    }
    return GlmMoeDsaConfig(**(values | changes))


def small_llama(**changes) -> LlamaConfig:
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
    }
    return LlamaConfig(**(values | changes))


def sharpened(model: Decoder) -> Decoder:
    """Spread the weights, so that attention, routing and selection are far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter *= 15 if "indexer" in name else 6
        generator = torch.Generator().manual_seed(99)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1, generator=generator)
    return model
