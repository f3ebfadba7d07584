"""Drafts that nothing can make, and options of an mtp stage without effect, are refused when a recipe is read."""

import copy

import pytest

from longarc.config.loader import validated
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError

DRAFTER = {"family": "glm_moe_dsa", "num_nextn_predict_layers": 1}
RECIPE = {
    "name": "r",
    "stages": {
        "pretrain": {"kind": "pretrain", "num_steps": 1},
        "mtp": {"kind": "mtp", "num_steps": 4, "corpus": {}},
    },
}


def read(*, model=None, pretrain=None, **mtp) -> Recipe:
    tree = copy.deepcopy(RECIPE)
    tree["stages"]["pretrain"] |= pretrain or {}
    tree["stages"]["mtp"] |= mtp
    return validated(Recipe, tree | ({"model": model} if model else {}), source="recipe")


def test_a_stage_adds_the_layer_and_a_model_may_bring_it():
    assert read().model.num_nextn_predict_layers == 0
    brought = read(model=DRAFTER, pretrain={"mtp": {"weight": 0.1}})
    assert brought.stages["pretrain"].mtp.loss == "cross_entropy"


def test_stages_behind_the_one_that_adds_the_layer_may_train_it_along():
    tree = copy.deepcopy(RECIPE)
    tree["stages"]["midtrain"] = {"kind": "midtrain", "num_steps": 1, "mtp": {}}
    assert validated(Recipe, tree, source="recipe").stages["midtrain"].mtp.trains_trunk


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pretrain": {"mtp": {}}},
            r"'pretrain': mtp trains a layer .*num_nextn_predict_layers = 1",
        ),
        ({"model": {"family": "llama"}}, r"'mtp' trains multi-token prediction.*llama model"),
        ({"model": DRAFTER | {"num_nextn_predict_layers": 2}}, "num_nextn_predict_layers"),
        ({"corpus": None}, r"corpus and demonstrations are both missing.*corpus = \{\}"),
        ({"activations": {"recomputed_layers": "all"}}, "nothing of them is kept"),
        ({"cross_entropy_steps": 4}, r"cross_entropy_steps=4 leaves none of num_steps=4"),
        (
            {"cross_entropy_steps": 1, "loss": "cross_entropy"},
            r"cross_entropy_steps=1 says what comes before.*Leave it out",
        ),
        ({"context_tokens": 5000}, r"'mtp': context_tokens=5000 exceeds"),
        ({"loss": "tv"}, "end_to_end_tv"),
        ({"demonstrations": {"tasks": {"none": {}}}}, r"'mtp' uses task families \['none'\]"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read(**changes)
