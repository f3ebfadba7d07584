"""Counts against published numbers, against our own models and against those of transformers."""

import json
from pathlib import Path

import pytest
import torch

from longarc.errors import ConfigError
from longarc.models.census import take_census
from longarc.models.decoder import GlmMoeDsa
from longarc.models.families import anatomy_of
from longarc.models.hf_config import config_to_hf
from longarc.models.llama import Llama
from model_cases import small_glm, small_llama, small_qwen

CONFIGS = Path(__file__).parent / "configs"


def config(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


def part(census, name):
    return next(part for part in census.anatomy.parts if part.name == name)


def test_glm_5_2_has_753_billion_parameters_of_which_744_are_no_mtp():
    census = take_census(config("glm_5_2"))
    # 753,329,921,024 is the sum over the headers of the published checkpoint, router biases left out.
    assert census.num_parameters == 753_329_921_024
    assert census.num_main_parameters == 743_377_000_704
    assert census.num_mtp_parameters == 9_952_920_320
    assert census.num_active_parameters / 1e9 == pytest.approx(40.30, abs=0.005)
    assert census.anatomy.num_router_biases == 19_456


def test_the_parts_of_glm_5_2_are_those_of_the_published_sum():
    census = take_census(config("glm_5_2"))
    latent_norms, key_norm = 2048 + 512, 2 * 128
    assert part(census, "attention").size == 165_019_648 + latent_norms
    assert part(census, "indexer").size == 9_371_648 + key_norm
    assert part(census, "indexer").copies + part(census, "indexer").mtp_copies == 22
    assert part(census, "routed expert").size == 3 * 6144 * 2048
    assert part(census, "routed expert").copies_per_token == 8 * 75


def test_glm_5_is_744_billion_with_40_active():
    census = take_census(config("glm_5"))
    assert round(census.num_main_parameters / 1e9) == 744
    assert int(census.num_active_parameters / 1e9) == 40


def test_published_sizes_of_other_families():
    assert take_census(config("llama_3_1_8b")).num_parameters == 8_030_261_248
    air = take_census(config("glm_4_5_air"))
    assert round(air.num_main_parameters / 1e9) == 107  # "106B-A12B"
    assert int(air.num_active_parameters / 1e9) == 12
    assert round(take_census(config("glm_4_7_flash")).num_main_parameters / 1e9) == 30


def test_published_sizes_of_qwen():
    # Non-embedding parameters as their model cards round them: 0.36 B of 0.49 B, and 0.44 B of 0.6 B.
    small = {"vocab_size": 151_936, "tie_word_embeddings": True, "max_position_embeddings": 32768}
    qwen2 = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    qwen2 |= {"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2}
    qwen3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    qwen3 |= {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8}
    assert take_census(small | qwen2).num_parameters == 494_032_768
    assert take_census(small | qwen3).num_parameters == 596_049_920


def test_layers_with_a_window_read_no_more_than_it():
    raw = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    raw |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128}
    window = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
    census, full = take_census(raw | window), take_census(raw)
    assert census.num_flops_per_token(10) == full.num_flops_per_token(10)
    two_layers = 2 * 4 * 32  # FLOP for each key further away
    assert full.num_flops_per_token(50) - census.num_flops_per_token(50) == 40 * two_layers
    by_name = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    assert take_census(raw | window | by_name) == census


def test_sharing_indexers_makes_a_token_at_a_million_cheaper_by_the_claimed_order():
    context = 2**20
    every = take_census(config("glm_5") | {"max_position_embeddings": context})
    shared = take_census(config("glm_5_2"))
    ratio = every.num_flops_per_token(context) / shared.num_flops_per_token(context)
    # The vendor claims 2.9 and does not say what it counts.
    assert 2.6 < ratio < 3.0


@pytest.mark.parametrize(
    "fields",
    [
        {"indexer_types": None, "index_topk_pattern": None},
        {"indexer_types": None, "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
    ],
)
def test_the_schedule_of_shared_indexers_may_be_a_frequency_or_a_pattern(fields):
    assert take_census(config("glm_5_2") | fields) == take_census(config("glm_5_2"))


def test_a_cache_row_of_glm_5_holds_latent_rotated_key_and_index_key():
    assert anatomy_of(config("glm_5")).cache == {
        "latent rows": 576 * 78,
        "index keys": 128 * 78,
    }
    assert anatomy_of(config("glm_5_2")).cache["index keys"] == 128 * 21
    assert anatomy_of(config("glm_5_2")).mtp_cache == 576 + 128
    assert anatomy_of(config("glm_4_5")).cache == {"keys and values": 2 * 8 * 128 * 92}


def test_sparse_attention_reads_at_most_its_selection_and_the_indexer_everything():
    census = take_census(config("glm_5"))
    weights = 2 * census.num_active_parameters
    attention, indexer = census.anatomy.reads
    assert attention.flops_per_key == 78 * 64 * 2 * (576 + 512)
    assert census.num_flops_per_token(100) == weights + 100 * (
        attention.flops_per_key + indexer.flops_per_key
    )
    assert census.num_flops_per_token(100_000) == (
        weights + 2048 * attention.flops_per_key + 100_000 * indexer.flops_per_key
    )


@pytest.mark.parametrize(
    "settings",
    [
        small_glm(),
        small_glm(n_shared_experts=0),
        small_glm(n_shared_experts=2, first_k_dense_replace=0),
        small_glm(first_k_dense_replace=9),
        small_glm(index_topk_pattern="FSS"),
        small_glm(index_topk_freq=2),
        small_llama(),
        small_llama(tie_word_embeddings=True, head_dim=12),
        small_llama(attention_bias="all"),
        small_llama(attention_bias="inputs", head_dim=12),
        small_llama(qk_norm=True, head_dim=12),
        small_qwen(),
    ],
)
def test_our_own_models_have_as_many_parameters(settings):
    model_class = Llama if settings.family == "llama" else GlmMoeDsa
    with torch.device("meta"):
        model = model_class(settings)
    census = take_census(config_to_hf(settings, dtype="float32"))
    assert census.num_parameters == sum(p.numel() for p in model.parameters())
    assert census.anatomy.num_router_biases == sum(b.numel() for b in model.buffers())
    every, some = range(settings.num_hidden_layers), model.cache_layers()
    assert sum(census.anatomy.cache.values()) == sum(
        width * len(some.get(kind, every)) for kind, width in model.cache_widths().items()
    )


EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 20,
}
INDEXED = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 12, "head_dim": 99}
GROUPED = {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None}
CASES = {
    "glm_moe_dsa": EXPERTS | LATENT | INDEXED,
    "glm_moe_dsa, shared": EXPERTS
    | LATENT
    | INDEXED
    | {"indexer_types": ["full", "shared", "full"]},
    "glm4_moe_lite": EXPERTS | LATENT,
    "glm4_moe": EXPERTS | GROUPED,
    "glm4_moe, norms and biases": EXPERTS | GROUPED | {"use_qk_norm": True, "attention_bias": True},
    "glm": GROUPED | {"attention_bias": True},
    "glm4": GROUPED | {"attention_bias": True},
    "llama": GROUPED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen2, wide heads and windows": GROUPED | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": GROUPED,
    "qwen3, biases": {
        "num_key_value_heads": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "llama, biases": GROUPED | {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_models_of_transformers_have_as_many_parameters(name):
    transformers = pytest.importorskip("transformers")
    raw = {
        "model_type": name.partition(",")[0],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        **CASES[name],
    }
    settings = transformers.AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # Both the config that was asked for and the file that transformers would write, whose fields differ.
    for written in (raw, settings.to_dict()):
        assert take_census(written).num_main_parameters == num_parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' .* known: chatglm, glm, glm4, glm4_moe, .*llama"),
        ({"model_type": None}, "None .* known"),
        ({"q_lora_rank": None}, "glm_moe_dsa: q_lora_rank: null, but it has no default"),
        ({"hidden_size": 0}, "hidden_size: .*greater than 0"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: .*less than or equal to 10000"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"index_topk_pattern": "FXS"}, "index_topk_pattern"),
        ({"index_topk_pattern": "FSF"}, "index_topk_pattern describes 3 layers, .*=78"),
        ({"indexer_types": ["full"] * 79}, "indexer_types describes 79 layers"),
        ({"first_k_dense_replace": None}, "neither first_k_dense_replace nor mlp_layer_types"),
        (
            {"num_experts_per_tok": 257},
            "of type glm_moe_dsa: num_experts_per_tok=257 exceeds n_routed_experts=256",
        ),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        take_census(config("glm_5") | change)


def test_heads_that_do_not_divide_the_width_need_a_head_dim():
    raw = config("llama_3_1_8b") | {"num_attention_heads": 33}
    with pytest.raises(ConfigError, match="not a multiple of num_attention_heads=33"):
        take_census(raw)


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        # A rotation of part of a head is not built in this family, and is as long all the same.
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5},
    ],
    ids=["old spelling", "new spelling", "partial"],
)
@pytest.mark.parametrize("name", ["llama_3_1_8b", "glm_4_5_air"])
def test_the_longest_context_of_yarn_is_the_stretched_one(name, rope):
    raw = config(name) | {"max_position_embeddings": 32768, "rope_scaling": None} | rope
    assert anatomy_of(raw).max_context == 131_072


@pytest.mark.parametrize(
    "rope", [{}, [1], {"type": "linear", "factor": 4.0}, {"type": "yarn"}, {"type": "yarn", "x": 1}]
)
def test_what_stretches_nothing_leaves_the_stated_context(rope):
    raw = config("llama_3_1_8b") | {"max_position_embeddings": 32768, "rope_scaling": rope}
    assert anatomy_of(raw).max_context == 32768


def test_a_null_without_a_default_is_named_as_a_null():
    with pytest.raises(ConfigError, match=r"hidden_size: null, but it has no default$"):
        anatomy_of(config("llama_3_1_8b") | {"hidden_size": None})
