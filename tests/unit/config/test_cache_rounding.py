"""A recipe that asks for a rounded cache of a model whose cache nobody rounds is refused when it is read."""

import pytest

from longarc.config.loader import validated
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError

PRETRAIN = {"kind": "pretrain", "num_steps": 1}
MIDTRAIN = {"kind": "midtrain", "num_steps": 1, "pattern": {"layers": "FFFF"}}


def read(model, **stages):
    tree = {
        "name": "r",
        "engine": {"cache_quantisation": "fp8"},
        "model": model,
        "stages": {"pretrain": PRETRAIN, **stages},
    }
    return validated(Recipe, tree, source="recipe")


@pytest.mark.parametrize("family", ["glm_moe_dsa", "llama"])
def test_it_is_taken_for_the_families_whose_cache_is_rounded(family):
    recipe = read({"family": family})
    assert recipe.engine.cache_quantisation == "fp8"


def test_layers_with_a_pattern_are_refused_with_the_stage_that_gives_it():
    with pytest.raises(
        ConfigError, match=r"cache_quantisation='fp8': stage 'mid' gives .* leave it at"
    ):
        read({"family": "glm_moe_dsa"}, mid=MIDTRAIN)


def test_a_model_that_begins_with_a_pattern_is_refused():
    model = {
        "family": "llama_hybrid",
        "num_hidden_layers": 2,
        "pattern": {"layers": "FS"},
    }
    with pytest.raises(ConfigError, match="the cache of a llama_hybrid model is not rounded"):
        read(model)
