import json

import pytest

from longarc.config.explain import find_options, json_schema, markdown, sections
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError


def option(name, key):
    return next(o for s in find_options(Recipe, name) for o in s.options if o.key == key)


def test_a_stage_is_explained_by_its_kind_with_nested_options():
    [section] = find_options(Recipe, "agentic_rl")
    keys = [o.key for o in section.options]
    assert section.name == "RlConfig"
    assert {"loop.max_lag_steps", "optimizer.lr", "rollout.temperature"} <= set(keys)


def test_an_option_has_type_range_default_and_unit():
    lag = option("agentic_rl", "loop.max_lag_steps")
    assert (lag.type, lag.allowed, lag.default, lag.unit) == (
        "integer",
        ">= 0",
        "0",
        "optimizer steps",
    )


def test_required_and_optional_options_say_so():
    assert option("pretrain", "num_steps").default == "(required)"
    theta = option("midtrain", "rope_theta")
    assert (theta.default, theta.type, theta.allowed) == ("(none)", "number or none", "> 1")


def test_a_choice_lists_its_values():
    assert '"constant" or "cosine"' in option("optimizer", "schedule").type


@pytest.mark.parametrize("name", ["OptimizerConfig", "optimizer", "optimizerconfig"])
def test_a_section_is_found_by_class_or_place(name):
    assert find_options(Recipe, name)[0].name == "OptimizerConfig"


def test_an_option_is_found_by_its_bare_name_once_and_by_a_dotted_one_everywhere():
    bare = find_options(Recipe, "max_lag_steps")
    dotted = find_options(Recipe, "loop.max_lag_steps")
    assert [s.name for s in bare] == ["RolloutLoopConfig"]
    assert [s.name for s in dotted] == ["RlConfig", "DistillConfig", "ValuePretrainConfig"]


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(ConfigError, match="did you mean max_lag_steps"):
        find_options(Recipe, "max_lag_step")


def test_every_option_of_the_recipe_has_a_description():
    missing = [
        f"{s.name}.{o.key}" for s in sections(Recipe) for o in s.options if not o.description
    ]
    assert missing == []


def test_the_page_holds_every_section_and_every_option_in_a_table():
    page = markdown(Recipe)
    for section in sections(Recipe):
        assert f"## {section.name}\n" in page
        for o in section.options:
            assert f"| `{o.key}` |" in page


def test_cells_of_the_page_do_not_break_its_tables():
    rows = [line for line in markdown(Recipe).splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)


def test_the_schema_is_json_that_an_editor_can_use():
    schema = json.loads(json_schema(Recipe))
    assert schema["properties"]["stages"]["additionalProperties"]["discriminator"]
    assert schema["additionalProperties"] is False


def test_a_key_of_any_member_of_a_union_is_explained_by_its_place():
    assert [s.name for s in find_options(Recipe, "engine.cache_tokens")] == ["EngineConfig"]
    assert {s.name for s in find_options(Recipe, "engine.on_update")} == {
        "VllmConfig",
        "SglangConfig",
    }
    assert "LlamaConfig" in {s.name for s in find_options(Recipe, "model.tie_word_embeddings")}


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("model.pattern", "AttentionPattern"),
        ("engine.routing", "RoutingConfig"),
        ("stages.sft", "SftConfig"),
        ("Stages.Agentic_RL", "RlConfig"),
        ("stages.agentic_rl.loop", "RolloutLoopConfig"),
        ("stages.anything.loop", "RolloutLoopConfig"),
        ("tasks.files", "TaskFamilyConfig"),
    ],
)
def test_a_section_is_found_by_its_whole_key(name, section):
    assert [s.name for s in find_options(Recipe, name)] == [section]


def test_every_place_that_is_printed_is_one_that_can_be_asked_for():
    for section in sections(Recipe):
        for place in section.places:
            if place != "(top)":
                assert find_options(Recipe, place), place
        options = [(p, o.key) for p in section.places[:1] for o in section.options if p != "(top)"]
        for place, key in options[:1]:
            assert find_options(Recipe, f"{place}.{key}"), (place, key)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("stages.sft.num_steps", ["SftConfig"]),
        ("stages.sft.optimizer.lr", ["OptimizerConfig"]),
        ("tasks.files.path", ["TaskFamilyConfig"]),
    ],
)
def test_an_option_is_found_by_its_whole_key(name, names):
    found = find_options(Recipe, name)
    assert [s.name for s in found] == names
    assert [o.key for s in found for o in s.options] == [name.rpartition(".")[2]]


def test_an_option_of_a_stage_with_a_name_of_its_own_is_that_of_every_kind_that_has_it():
    names = {s.name for s in find_options(Recipe, "stages.warm_start.num_steps")}
    assert {"SftConfig", "PretrainConfig", "MidtrainConfig"} <= names


def test_a_whole_key_that_leads_nowhere_is_refused():
    for name in ("model.patern", "stages.sft.num_step", "stages.eval.loop.nothing"):
        with pytest.raises(ConfigError, match="nothing is called"):
            find_options(Recipe, name)
