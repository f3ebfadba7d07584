"""Small models for tests: shapes that differ from one another, and weights far from uniform."""

import random

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longarc.config.model import GlmMoeDsaConfig, LlamaConfig
from longarc.config.rope import YarnRope
from longarc.models.build import build_model
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Decoder

YARN = YarnRope(
    factor=4.0, original_max_position_embeddings=24, mscale=0.7, mscale_all_dim=1.3, beta_fast=4.0
)
"""Of its pairs some are kept, some slowed and some in between, where heads are 4 to 16 wide."""


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


def small_qwen(**changes) -> LlamaConfig:
    """Everything that a Llama-type model can have besides: biases, norms of heads, stretched rotations."""
    extras = {"qk_norm": True, "attention_bias": "all", "rope_scaling": YARN}
    return small_llama(**(extras | changes))


def sharpened(model: Decoder) -> Decoder:
    """Spread the weights, so that attention, routing and selection are far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter *= 15 if "indexer" in name else 6
            elif name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
            elif name.endswith("_proj.bias"):
                parameter.copy_(torch.linspace(-1, 1, len(parameter)).roll(len(name)))
        generator = torch.Generator().manual_seed(99)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1, generator=generator)
    return model


def other_chooser(model):
    """Return the model with other choices: nothing else of it depends on what differs."""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*other.named_parameters(), *other.named_buffers()]:
            if "indexer" in name or name.endswith("e_score_correction_bias"):
                tensor += 0.5 * torch.randn(tensor.shape, generator=generator)
    return other


def apt_drafter(*, seed: int = 3, boldness: float = 0.3, **changes) -> GlmMoeDsa:
    """Return a small model whose untrained MTP layer drafts well, but not perfectly.

    Its layers say little, so that the next token depends on the newest one most of all; and the MTP layer passes on
    the embedding of that.

    Args:
        seed: of the weights.
        boldness: how much the layers say, on both sides; 0 drafts perfectly.
        changes: in the config.
    """
    config = small_glm(num_nextn_predict_layers=1, **changes)
    model = sharpened(build_model(config, seed=seed))
    assert isinstance(model, GlmMoeDsa)
    assert model.mtp is not None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter *= boldness
        width = config.hidden_size
        model.model.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(seed))
        model.mtp.eh_proj.weight[:, :width] = torch.eye(width)
        model.mtp.eh_proj.weight[:, width:] *= boldness
    return model


def replay_in_random_company(model, documents, *, seed, max_length=96):
    """Feed the documents to the cache in random pieces and batches; return their hidden states."""
    rng = random.Random(seed)
    cache = model.new_cache(len(documents) + 2, max_length)
    slots = rng.sample(range(len(documents) + 2), len(documents))
    done, hidden = [0] * len(documents), [[] for _ in documents]
    while any(d < len(ids) for d, ids in zip(done, documents, strict=True)):
        live = [i for i, ids in enumerate(documents) if done[i] < len(ids)]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        counts = [
            min(len(documents[i]) - done[i], rng.randint(2, 30) if done[i] == 0 else 1)
            if rng.random() < 0.95
            else min(len(documents[i]) - done[i], 7)
            for i in chosen
        ]
        pieces = [documents[i][done[i] : done[i] + n] for i, n in zip(chosen, counts, strict=True)]
        new = model.extend(
            torch.cat(pieces), [slots[i] for i in chosen], [done[i] for i in chosen], counts, cache
        )
        for i, n, piece in zip(chosen, counts, new.split(counts), strict=True):
            hidden[i].append(piece)
            done[i] += n
    return [torch.cat(pieces) for pieces in hidden]


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest tensor holds that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result
