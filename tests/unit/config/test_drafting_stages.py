"""A recipe whose stages are to draft without anything that could is refused before the stages in front of them are trained."""

import pytest

from longarc.config.engine import EngineConfig
from longarc.config.loader import validated
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError

DRAFTER = {"family": "glm_moe_dsa", "num_nextn_predict_layers": 1}
PRETRAIN = {"kind": "pretrain", "num_steps": 1}
MTP = {"kind": "mtp", "num_steps": 1, "corpus": {}}
RL = {"kind": "reasoning_rl", "loop": {"num_steps": 1}, "tasks": {"t": {}}}
MIDTRAIN = {"kind": "midtrain", "num_steps": 1, "pattern": {"layers": "FFFF"}}


def evaluation(*stages):
    return {"kind": "eval", "stages": list(stages), "tasks": {"t": {}}}


def read(stages, *, model=None, **engine):
    tree = {
        "name": "r",
        "tasks": {"t": {"path": "a:B"}},
        "engine": {"num_speculative_tokens": 2, **engine},
        "stages": {"pretrain": PRETRAIN, **stages},
    }
    return validated(Recipe, tree | ({"model": model} if model else {}), source="recipe")


@pytest.mark.parametrize(
    ("stages", "settings", "message"),
    [
        ({"rl": RL}, {}, r"stage 'rl': engine\.num_speculative_tokens=2.* put an mtp stage before"),
        ({"rl": RL, "mtp": MTP}, {}, "stage 'rl'"),
        ({"mtp": MTP, "eval": evaluation("pretrain", "mtp")}, {}, "the model of 'pretrain' has no"),
        ({"rl": RL}, {"model": {"family": "llama"}}, "leave it at 0: models of this family"),
        ({"mid": MIDTRAIN, "rl": RL}, {"model": DRAFTER}, "stage 'rl'.*such a pattern"),
    ],
)
def test_what_cannot_draft_by_then_is_refused_by_the_stage(stages, settings, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read(stages, **settings)


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        ({"mtp": MTP, "rl": RL, "eval": evaluation("mtp", "rl")}, {}),
        ({"rl": RL, "eval": evaluation("pretrain", "rl")}, {"model": DRAFTER}),
        ({"rl": RL}, {"servers": ["http://a:1"]}),
        ({"rl": RL}, {"num_speculative_tokens": 0}),
    ],
)
def test_what_can_draft_or_leaves_it_to_others_is_not(stages, settings):
    assert read(stages, **settings).engine.servers == tuple(settings.get("servers", ()))


def test_a_port_that_no_machine_has_is_refused():
    assert EngineConfig(servers=("http://a:65535",))
    with pytest.raises(ValueError, match="no port 65536"):
        EngineConfig(servers=("http://a:65536",))
