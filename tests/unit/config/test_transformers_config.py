"""Settings of models that transformers computes: in recipes, on the command line, and refused where they are wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.config.transformers_model import TransformersConfig
from longarc.errors import ConfigError
from transformers_cases import BASE, LATENT, MIXTURE, small

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke.toml"
SIZES = (
    "vocab_size=1024,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
)
MODEL = f"model={{family='glm4',hf_config={{{SIZES},max_position_embeddings=4096}}}}"
TEXT_ONLY = "stages={pretrain={kind='pretrain',num_steps=1}}"


def test_a_recipe_may_start_from_random_weights_and_change_one_setting():
    changed = "model.hf_config.hidden_size=48"
    recipe = load_settings(Recipe, SMOKE, overrides=[MODEL, changed, TEXT_ONLY])
    assert recipe.model.hidden_size == 48
    assert recipe.model.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.hf_config.hidden_size='wide'"],
            "hf_config.hidden_size='wide' has to be a whole num",
        ),
        (["model.hf_config.num_key_value_heads=3"], "is not a multiple of num_key_value_heads=3"),
        (["model.family='glm5'"], "glm4_moe_lite"),
        (["stages.pretrain.int4_group_size=8"], "int4_group_size=8 rounds the routed experts"),
        (["stages.pretrain.router_bias_rate=0.5"], "a glm4 model has no experts to balance"),
        (
            ["stages.pretrain.context_tokens=8192"],
            r"exceeds model.hf_config.max_position_embeddings=4096; .* raise model.hf_config.max_pos",
        ),
        (
            ["tokenizer.vocab_size=2048"],
            r"exceeds model.hf_config.vocab_size=1024.* Raise model.hf_config.vocab_size",
        ),
        (["stages.mtp={kind='mtp',num_steps=1,corpus={}}"], "which a glm4 model does not have"),
    ],
)
def test_a_recipe_that_asks_for_what_cannot_be_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_settings(Recipe, SMOKE, overrides=[MODEL, TEXT_ONLY, *overrides])


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("glm4", {"model_type": "glm4"}, "hf_config.model_type='glm4' is not read"),
        ("glm4", {"dtype": "bfloat16"}, "hf_config.dtype='bfloat16' is not read"),
        (
            "glm4",
            {"num_hidden_layers": 0},
            "num_hidden_layers=0 has to be a whole number of at least",
        ),
        ("glm4", {"num_hidden_layers": True}, "num_hidden_layers=True has to be"),
        (
            "glm4_moe",
            {"num_experts_per_tok": 7},
            "num_experts_per_tok=7 exceeds n_routed_experts=6",
        ),
        ("glm4_moe", {"n_group": 4}, "n_group=4 does not divide n_routed_experts=6"),
        ("glm4_moe", {"n_group": 6}, "into groups of at least 2"),
        ("glm4_moe_lite", {"v_head_dim": None}, "hf_config.v_head_dim=None has to be"),
        ("glm", {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ("glm", {"rope_scaling": [1]}, "is no object"),
    ],
)
def test_wrong_settings_are_refused_by_name(family, changes, said):
    with pytest.raises(ValidationError, match=said):
        small(family, **changes)


def test_only_mixtures_carry_a_layer_for_drafts():
    assert small("glm4_moe", carries_mtp=True).carries_mtp
    with pytest.raises(ValidationError, match="glm4 checkpoints have no MTP layer"):
        small("glm4", carries_mtp=True)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
    ],
)
def test_yarn_stretches_the_context_and_nothing_else_does(rope, expected):
    assert small("glm4", rope_parameters=rope).max_position_embeddings == expected


def test_sizes_are_read_from_the_content_of_config_json():
    config = TransformersConfig(family="glm4_moe_lite", hf_config=BASE | MIXTURE | LATENT)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (64, 32, 2)
    assert (config.n_routed_experts, config.num_attention_heads, config.v_head_dim) == (6, 4, 10)
    assert (config.rope_theta, config.initializer_range) == (1e4, 0.1)
    assert small("glm").n_routed_experts == 0
    assert TransformersConfig.model_validate_json(config.model_dump_json()) == config


def test_reading_a_recipe_loads_neither_torch_nor_transformers():
    script = (
        "import sys; from longarc.config.loader import load_settings; from longarc.config.recipe import Recipe; "
        f"load_settings(Recipe, __import__('pathlib').Path({str(SMOKE)!r}), overrides={[MODEL, TEXT_ONLY]!r}); "
        "sys.exit(str(sorted({'torch', 'transformers'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "[]"
