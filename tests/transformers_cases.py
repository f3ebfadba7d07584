"""Small models of transformers' classes for tests, and transformers' own computation of the same files."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from longarc.config.transformers_model import MIXTURES, TransformersConfig

FAMILIES = ("glm", "glm4", "glm4_moe", "glm4_moe_lite")
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
MIXTURE = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}


def small(family: str, *, carries_mtp: bool = False, **changes: Any) -> TransformersConfig:
    values = dict(BASE)
    if family in MIXTURES:
        values |= MIXTURE
    if family == "glm4_moe_lite":
        values |= LATENT
        del values["head_dim"]
    return TransformersConfig(family=family, hf_config=values | changes, carries_mtp=carries_mtp)


def random_config(family: str, rng: random.Random) -> TransformersConfig:
    layers, key_heads = rng.randint(1, 3), rng.randint(1, 3)
    changes: dict[str, Any] = {
        "hidden_size": rng.choice([16, 24, 40]),
        "num_hidden_layers": layers,
        "num_key_value_heads": key_heads,
        "num_attention_heads": key_heads * rng.randint(1, 3),
        "intermediate_size": rng.choice([16, 48]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "tie_word_embeddings": rng.random() < 0.3,
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": rope(rng),
    }
    if family in MIXTURES:
        groups, experts = rng.choice([1, 2]), 2 * rng.randint(2, 4)
        changes |= {
            "n_routed_experts": experts,
            "n_group": groups,
            "topk_group": 1,
            "num_experts_per_tok": rng.randint(1, experts // groups),
            "norm_topk_prob": rng.random() < 0.5,
            "routed_scaling_factor": rng.choice([1.0, 2.5]),
        }
    if family == "glm4_moe":
        changes |= {"use_qk_norm": rng.random() < 0.5}
        changes |= {"first_k_dense_replace": rng.randint(0, layers)}
    if family == "glm4_moe_lite":
        changes |= {
            "num_key_value_heads": changes["num_attention_heads"],
            "q_lora_rank": rng.choice([None, 12]),
            "qk_nope_head_dim": rng.randint(2, 12),
            "qk_rope_head_dim": rng.choice([2, 8]),
            "v_head_dim": rng.randint(2, 12),
            "rope_interleave": rng.random() < 0.5,
        }
    else:
        changes |= {"head_dim": rng.choice([8, 16])}
    return small(family, **changes)


def rope(rng: random.Random) -> dict[str, Any]:
    theta = rng.choice([100.0, 1e4, 1e6])
    partial = {"rope_theta": theta, "partial_rotary_factor": rng.choice([0.5, 1.0])}
    return rng.choice(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ]
    ) | (partial if rng.random() < 0.7 else {"rope_theta": theta})


def spread(model: nn.Module) -> Any:
    """Spread weights, biases and router biases, so that everything decides something."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                tensor.normal_(std=0.3, generator=generator)
            elif tensor.dim() > 1:
                tensor *= 2
            else:
                tensor += torch.randn(tensor.shape, generator=generator) * 0.1
    return model


def of_transformers(directory: Any) -> Any:
    """Load a directory with transformers' own attention and experts."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


@torch.no_grad()
def reference_logits(reference: Any, documents: list[Tensor]) -> list[Tensor]:
    """Compute documents as one batch, padded on the left."""
    longest = max(len(ids) for ids in documents)
    padded = torch.stack([nn.functional.pad(ids, (longest - len(ids), 0)) for ids in documents])
    is_token = torch.stack([torch.arange(longest) >= longest - len(ids) for ids in documents])
    positions = (is_token.cumsum(1) - 1).clamp_min(0)
    logits = reference(padded, attention_mask=is_token.long(), position_ids=positions).logits
    return [row[longest - len(ids) :] for row, ids in zip(logits, documents, strict=True)]
