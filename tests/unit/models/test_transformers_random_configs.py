"""Logits of 32 random models against transformers' GlmMoeDsa, packed and padded on the left; half of them share indexers.

Equal epsilons, and transformers' ``topk`` replaced by one that keeps the tie rule: with few index heads many scores
are exactly zero, and ``topk`` promises nothing about them.
"""

import random
from typing import NamedTuple

import pytest
import torch

from longarc.config.rope import LinearRope
from longarc.models.build import build_model
from longarc.models.hf_weights import save_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from model_cases import YARN, small_glm

TOLERANCE = 2e-5


class TopK(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


def topk_with_tie_rule(scores, k, dim=-1, largest=True, sorted=True):
    assert largest
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return TopK(values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


def random_schedule(rng: random.Random, layers: int):
    """Draw which layers reuse a selection, as a pattern or by a rule; at least one does."""
    if rng.random() < 0.5:
        kinds = ["F", "S", *(rng.choice("FS") for _ in range(layers - 2))]
        rest = kinds[1:]
        rng.shuffle(rest)
        return {"index_topk_pattern": "".join(["F", *rest])}
    offset = rng.randint(1, layers - 1)
    return {"index_topk_freq": rng.randint(2, 4), "index_skip_topk_offset": offset}


def random_config(rng: random.Random, *, shares: bool):
    layers = rng.randint(2, 6) if shares else rng.randint(1, 4)
    rope = rng.choice([2, 4, 8])
    experts = rng.randint(2, 8)
    return small_glm(
        hidden_size=rng.choice([16, 24, 40]),
        num_hidden_layers=layers,
        first_k_dense_replace=rng.randint(0, layers),
        num_attention_heads=rng.randint(1, 6),
        q_lora_rank=rng.randint(8, 24),
        kv_lora_rank=rng.randint(8, 24),
        qk_nope_head_dim=rng.randint(2, 16),
        qk_rope_head_dim=rope,
        v_head_dim=rng.randint(2, 16),
        intermediate_size=rng.choice([16, 48]),
        moe_intermediate_size=rng.choice([8, 24]),
        n_routed_experts=experts,
        num_experts_per_tok=rng.randint(1, experts),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        index_n_heads=rng.choice([1, 2, 4, 8, 32]),
        index_head_dim=rope + rng.randint(0, 8),
        index_topk=rng.randint(1, 40),
        rope_theta=rng.choice([100.0, 1e4, 8e6]),
        rope_scaling=rng.choice([None, YARN, LinearRope(factor=3.0)]),
        rms_norm_eps=rng.choice([1e-6, 1e-5]),
        latent_norm_eps=1e-6,  # what transformers always takes
        **(random_schedule(rng, layers) if shares else {}),
    )


def spread(model):
    """Spread the weights, so that attention and selection matter and logits are of the size of one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter *= 15 if "indexer" in name else 4
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(32))
def test_packed_and_padded_logits_are_those_of_transformers(seed, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(torch.Tensor, "topk", topk_with_tie_rule)
    rng = random.Random(seed)
    shares = seed % 2 == 1
    config = random_config(rng, shares=shares)
    assert ("shared" in config.indexer_kinds) == shares
    ours = spread(build_model(config, seed=seed))
    save_pretrained_dir(ours, tmp_path)
    reference = transformers.GlmMoeDsaForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    reference.eval()
    lengths = [rng.randint(1, 60) for _ in range(3)]
    layout = Layout.documents(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (sum(lengths),), generator=generator)

    with torch.no_grad():
        logits = project_logits(ours(ids, layout).hidden, ours.output_weight)
        packed = reference(
            ids[None], position_ids=layout.position_ids()[None], use_cache=False
        ).logits[0]
        longest = max(lengths)
        mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
        padded_ids = torch.zeros_like(mask).masked_scatter(mask.bool(), ids)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        padded = reference(padded_ids, attention_mask=mask, position_ids=positions).logits

    assert packed.std() > 0.3
    torch.testing.assert_close(logits, packed, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits, padded[mask.bool()], rtol=0, atol=TOLERANCE)
