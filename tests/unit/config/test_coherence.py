"""Settings that contradict each other across the recipe are refused when it is read."""

import copy

import pytest

from longarc.config.loader import validated
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError

LOOP = {"num_steps": 1, "group_size": 2, "max_concurrent_rollouts": 8}
RECIPE = {
    "name": "r",
    "engine": {"max_running": 8, "max_waiting": 8},
    "tasks": {"t": {"path": "a.b:C"}},
    "stages": {
        "pretrain": {"kind": "pretrain", "num_steps": 1},
        "rl": {"kind": "agentic_rl", "tasks": {"t": {}}, "loop": LOOP},
        "distill": {
            "kind": "distill",
            "tasks": {"t": {}},
            "teachers": {"t": "rl"},
            "loop": {**LOOP, "dynamic_sampling": False},
        },
        "eval": {
            "kind": "eval",
            "stages": ["rl"],
            "tasks": {"t": {}},
            "max_concurrent_rollouts": 8,
        },
    },
}


def read(key: str = "name", value: object = "r") -> Recipe:
    tree = copy.deepcopy(RECIPE)
    *path, last = key.split(".")
    node = tree
    for part in path:
        node = node.setdefault(part, {})
    node[last] = value
    return validated(Recipe, tree, source="recipe")


def behind_pretraining(tree, **stages):
    """Return the stages with more of them behind the first."""
    first, *others = tree["stages"].items()
    return dict([first, *stages.items(), *others])


def test_servers_have_queues_of_their_own_but_evaluations_do_not_use_them():
    engine = RECIPE["engine"] | {"servers": ["http://a:8100"]}
    tree = RECIPE | {"engine": engine, "stages": copy.deepcopy(RECIPE["stages"])}
    tree["stages"]["rl"]["loop"]["max_concurrent_rollouts"] = 500
    assert validated(Recipe, tree, source="recipe").engine.servers
    tree["stages"]["eval"]["max_concurrent_rollouts"] = 500
    with pytest.raises(ConfigError, match=r"'eval'.*max_concurrent_rollouts=500"):
        validated(Recipe, tree, source="recipe")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_from_elsewhere_are_not_asked_for_routing(engine):
    tree = RECIPE | {
        "engine": {"kind": engine, "url": "http://a:8100", "max_running": 8},
        "stages": copy.deepcopy(RECIPE["stages"]),
    }
    tree["stages"]["rl"]["rollout"] = {"routing_replay": "experts"}
    with pytest.raises(ConfigError, match=r"'rl'.*routing_replay='experts' needs an engine that"):
        validated(Recipe, tree, source="recipe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"family": "llama"}}, "replays experts and selected keys, but a llama model"),
        (
            {
                "model": {
                    "family": "glm_moe_dsa",
                    "num_hidden_layers": 3,
                    "first_k_dense_replace": 3,
                }
            },
            "but no layer has experts",
        ),
        (
            {"stages.mid": {"kind": "midtrain", "num_steps": 1, "pattern": {"layers": "FSFS"}}},
            "but the hybrid that stage 'mid' makes has none",
        ),
    ],
)
def test_only_what_a_model_chooses_can_be_replayed(changes, message):
    tree = copy.deepcopy(RECIPE)
    stage = changes.pop("stages.mid", None)
    if stage is not None:
        tree["stages"] = behind_pretraining(tree, mid=stage)
    tree |= changes
    tree["stages"]["rl"]["rollout"] = {"routing_replay": "experts"}
    with pytest.raises(ConfigError, match=message):
        validated(Recipe, tree, source="recipe")


def test_selected_keys_are_replayed_by_what_attends_sparsely_alone():
    message = r"'rl'.*routing_replay='experts_and_keys'.* attends to every key"
    with pytest.raises(ConfigError, match=message):
        read("stages.rl.rollout.routing_replay", "experts_and_keys")
    assert read("stages.rl.rollout.routing_replay", "experts").stages["rl"]
    tree = copy.deepcopy(RECIPE)
    optimizer = {"warmup_steps": 0}
    dsa = {"kind": "dsa", "warmup_steps": 1, "num_steps": 1, "optimizer": optimizer}
    tree["stages"] = behind_pretraining(tree, dsa=dsa)
    tree["stages"]["rl"]["rollout"] = {"routing_replay": "experts_and_keys"}
    assert validated(Recipe, tree, source="recipe").stages["rl"].rollout.routing_replay


def test_an_evaluation_has_nothing_to_replay():
    with pytest.raises(ConfigError, match=r"routing_replay='experts' has no effect in an eval"):
        read("stages.eval.rollout.routing_replay", "experts")


def test_what_running_turns_do_at_an_update_is_the_stages_to_say_for_our_own_engine_alone():
    recipe = read("stages.rl.rollout.on_update", "recompute")
    assert recipe.stages["rl"].rollout.on_update == "recompute"
    tree = RECIPE | {
        "engine": {"kind": "vllm", "url": "http://a:8100", "max_running": 8},
        "stages": copy.deepcopy(RECIPE["stages"]),
    }
    assert validated(Recipe, tree, source="recipe")
    tree["stages"]["rl"]["rollout"] = {"on_update": "recompute"}
    with pytest.raises(ConfigError, match=r"'rl': rollout.on_update='recompute'.*engine.on_update"):
        validated(Recipe, tree, source="recipe")


def test_the_recipe_as_it_stands_is_accepted():
    assert list(read().stages) == ["pretrain", "rl", "distill", "eval"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "stages.pretrain.activations.recomputed_layers",
            [0, 4],
            r"'pretrain'.*recomputed_layers: layer 4 does not exist.*layers 0\.\.3",
        ),
        (
            "stages.pretrain.int4_group_size",
            24,
            r"'pretrain'.*int4_group_size=24 does not divide model.hidden_size=128",
        ),
        (
            "stages.rl.activations.offloaded_layers",
            "some",
            r"offloaded_layers: 'some' chooses no layers; write \"none\"",
        ),
        (
            "stages.rl.rollout.max_context_tokens",
            5000,
            r"'rl'.*max_context_tokens=5000.*max_position_embeddings=4096",
        ),
        (
            "stages.eval.rollout.max_context_tokens",
            5000,
            r"'eval'.*5000.*max_position_embeddings=4096",
        ),
        (
            "stages.pretrain.context_tokens",
            5000,
            r"'pretrain': context_tokens=5000.*embeddings=4096",
        ),
        ("tokenizer.vocab_size", 4096, r"vocab_size=4096 exceeds model.vocab_size=2048.*Raise"),
        ("engine.cache_tokens", 500, r"max_running=8 .*page of 64.*cache_tokens=500.*raise cache"),
        ("engine.cache_tokens", 1000, r"'rl': .*max_context_tokens=1024.*cache_tokens=1000"),
        ("engine.page_tokens", 48, r"page_tokens=48 has to be a power of two"),
        (
            "stages.rl.loop.max_concurrent_rollouts",
            17,
            r"'rl': loop.max_concurrent_rollouts=17.*=8",
        ),
        ("stages.eval.max_concurrent_rollouts", 17, r"'eval': max_concurrent_rollouts=17.*=8"),
        ("stages.eval.rollout.on_update", "finish", r"on_update='finish' has no effect in an eval"),
        ("stages.rl.rollout.on_update", "drain", r"rollout.on_update = 'drain'"),
        ("stages.rl.rollout.temperature", 0, r"temperature=0 .*Use a temperature above 0"),
        ("stages.distill.rollout.temperature", 0, r"temperature=0 .*Use a temperature above 0"),
        (
            "stages.rl.loop",
            {**LOOP, "group_size": 1, "dynamic_sampling": False},
            r"group_size=1.*at least 2.*running_mean.*reinforce_plus_plus",
        ),
        ("stages.rl.advantage", "gae", r"stages.rl.advantage = 'gae'"),
        (
            "stages.rl.running_mean_window",
            8,
            r"running_mean_window=8 has no effect with advantage=.std.",
        ),
        (
            "stages.rl.overlong",
            {"max_tokens": 4000, "cache_tokens": 100},
            r"more than max_tokens - cache_tokens = 3900 .*max_context_tokens=\d+ never lets",
        ),
        (
            "stages.rl.overlong",
            {"max_tokens": 40, "cache_tokens": 41},
            r"cache_tokens=41 begin before the first of max_tokens=40",
        ),
        ("stages.distill.loop.max_mean_reward", 0.9, r"max_mean_reward=0.9 would drop groups"),
        (
            "stages.distill.loop.dynamic_sampling",
            True,
            r"does not learn from.*dynamic_sampling=false",
        ),
        (
            "stages.distill.teachers.other",
            "rl",
            r"families that the stage does not have: \['other'\]",
        ),
        (
            "stages.distill.teachers.t",
            "eval",
            r"\['eval'\] are not training stages before it; available",
        ),
        ("stages.eval.stages", ["initial"], r"\['initial'\] are not training stages before it"),
        ("stages.distill.teachers.t", "initial", r"\['initial'\] are not training stages"),
        ("stages.rl.tasks", {}, r"stages.rl.tasks = \{\}: .*at least 1 item"),
        ("stages.eval.stages", [], r"stages.eval.stages = \[\]: .*at least 1 item"),
        ("stages.a/b", {"kind": "pretrain", "num_steps": 1}, r"already exist|file names"),
        ("tasks.a/b", {"path": "a.b:C"}, r"task family 'a/b'.*file names and ids"),
        (
            "stages.serve",
            {"kind": "midtrain", "num_steps": 1},
            r"'serve'.*names that LongArc itself",
        ),
        (
            "stages.eval-64",
            {"kind": "midtrain", "num_steps": 1},
            r"'eval-64'.*names that LongArc",
        ),
        ("stages.pretrain.optimizer", {"lr": float("inf")}, r"lr = inf: should be a finite number"),
        (
            "stages.rl.loss",
            {"settings": {"low": float("nan")}},
            r"low = nan: should be a finite number",
        ),
        ("seed", 2**63, r"seed = 9223372036854775808: should be less than"),
        ("name", "..", r"name = '\.\.': string should match"),
        ("stages.dsa", {"kind": "dsa", "num_steps": 1, "warmup_steps": 1}, None),
        (
            "stages.windows",
            {"kind": "midtrain", "num_steps": 1, "pattern": {"layers": "FSF"}},
            r"'windows': pattern.layers='FSF' names 3 layers, but model.num_hidden_layers=4",
        ),
        (
            "stages.windows",
            {"kind": "midtrain", "num_steps": 1, "pattern": {"layers": "FSXF"}},
            r"pattern.layers = 'FSXF': string should match",
        ),
    ],
)
def test_a_contradiction_is_refused_with_its_values_and_the_fix(key, value, message):
    if message is None:
        assert key.removeprefix("stages.") in read(key, value).stages
        return
    with pytest.raises(ConfigError, match=message):
        read(key, value)


def test_what_a_recipe_starts_from_is_evaluated_and_teaches():
    tree = copy.deepcopy(RECIPE) | {"initial": {"path": "m"}, "tokenizer": {"path": "m"}}
    del tree["stages"]["pretrain"]
    tree["stages"]["distill"]["teachers"] = {"t": "initial"}
    tree["stages"]["eval"]["stages"] = ["initial", "rl"]
    assert validated(Recipe, tree, source="recipe").stages["eval"].stages == ["initial", "rl"]


def test_a_model_without_an_indexer_cannot_be_made_sparse():
    tree = copy.deepcopy(RECIPE)
    tree["model"] = {"family": "llama"}
    tree["stages"]["dsa"] = {"kind": "dsa", "num_steps": 1, "warmup_steps": 1}
    with pytest.raises(ConfigError, match=r"'dsa'.*a llama model has no indexer; remove the stage"):
        validated(Recipe, tree, source="recipe")


def test_a_selection_that_leaves_nothing_out_is_no_conversion():
    tree = copy.deepcopy(RECIPE)
    tree["model"] = {"family": "glm_moe_dsa", "index_topk": 128}
    tree["stages"]["dsa"] = {
        "kind": "dsa", "num_steps": 1, "warmup_steps": 1, "context_tokens": 128
    }  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"'dsa'.*index_topk=128 is not below context_tokens=128.*lower"
    ):
        validated(Recipe, tree, source="recipe")


def test_an_indexer_that_an_earlier_conversion_took_away_does_not_come_back():
    tree = copy.deepcopy(RECIPE)
    conversion = {"kind": "dsa", "num_steps": 1, "warmup_steps": 1}
    tree["stages"]["dsa"] = conversion | {"index_topk_pattern": "FFSF"}
    tree["stages"]["again"] = conversion | {"index_topk_pattern": "FSSF"}
    assert "again" in validated(Recipe, tree, source="recipe").stages
    tree["stages"]["again"] = conversion | {"index_topk_pattern": "FFFF"}
    with pytest.raises(
        ConfigError, match=r"'again': index_topk_pattern: layer 2 should have an indexer in 'FFFF'"
    ):
        validated(Recipe, tree, source="recipe")


def test_an_indexer_warmup_that_never_reaches_its_rate_is_refused():
    tree = copy.deepcopy(RECIPE)
    tree["stages"]["dsa"] = {
        "kind": "dsa", "num_steps": 9, "warmup_steps": 4, "optimizer": {"warmup_steps": 5}
    }  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"(?s)optimizer.warmup_steps=5 .*has warmup_steps=4 .*lower"
    ):
        validated(Recipe, tree, source="recipe")
    tree["stages"]["dsa"]["optimizer"] = {"warmup_steps": 4}
    assert "dsa" in validated(Recipe, tree, source="recipe").stages


def test_a_pattern_of_attention_cannot_be_made_sparse():
    tree = copy.deepcopy(RECIPE)
    tree["stages"]["windows"] = {"kind": "midtrain", "num_steps": 1, "pattern": {"layers": "FSGD"}}
    assert "windows" in validated(Recipe, tree, source="recipe").stages
    tree["stages"]["dsa"] = {"kind": "dsa", "num_steps": 1, "warmup_steps": 1}
    with pytest.raises(ConfigError, match=r"'dsa'.*'windows' has replaced.*remove one"):
        validated(Recipe, tree, source="recipe")


@pytest.mark.parametrize("stage", ["pretrain", "rl", "distill"])
def test_a_warmup_longer_than_its_stage_is_refused(stage):
    tree = copy.deepcopy(RECIPE)
    tree["stages"][stage]["optimizer"] = {"warmup_steps": 999}
    with pytest.raises(ConfigError, match=f"(?s){stage}.*warmup_steps=999"):
        validated(Recipe, tree, source="recipe")


def test_int4_without_experts_is_refused():
    tree = copy.deepcopy(RECIPE) | {"model": {"family": "llama"}}
    tree["stages"]["pretrain"]["int4_group_size"] = 32
    with pytest.raises(ConfigError, match="a llama model has none"):
        validated(Recipe, tree, source="recipe")
