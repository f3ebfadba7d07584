"""Numbers of a config.json: taken as they stand, and refused by name where no model can have them or no memory."""

import json
import re

import pytest
import torch

import chatglm_cases
from longarc.cli.main import main
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError, ResourceError
from longarc.models.build import build_model, build_without_memory
from longarc.models.census import take_census
from longarc.models.elders.chatglm_config import read_chatglm_config
from longarc.models.hf_config import config_from_hf, config_to_hf
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.models.room import available_bytes, check_room
from longarc.pipeline.preflight import check_recipe
from model_cases import small_glm, small_llama, small_qwen
from token_samples import small_tokenizer
from transformers_cases import small

CONFIGS = {
    "glm_moe_dsa": config_to_hf(small_glm(), dtype="float32"),
    "llama": config_to_hf(small_llama(), dtype="float32"),
    "qwen2": config_to_hf(small_qwen(), dtype="float32"),
    "glm4": config_to_hf(small("glm4"), dtype="float32"),
    "glm4_moe": config_to_hf(small("glm4_moe"), dtype="float32"),
}


def with_change(raw, name, value):
    """Return a config as it comes out of a file, with a field, or one of an object in it, changed."""
    raw = json.loads(json.dumps(raw))
    *above, last = name.split(".")
    place = raw.setdefault(above[0], {"rope_type": "default"}) if above else raw
    place[last] = value
    return json.loads(json.dumps(raw))


NOT_NUMBERS = [
    *(("hidden_size", value) for value in ("1e6", "48", True, 48.0, float("nan"), 10**400)),
    *(("intermediate_size", value) for value in ("64", True, 64.0, float("inf"))),
    *(("num_hidden_layers", value) for value in ("3", True, 3.5)),
    *(("max_position_embeddings", value) for value in ("512", True, 1e20, 2**60)),
    *(("rms_norm_eps", value) for value in ("1e-5", True, float("nan"), float("inf"))),
    *(("rope_parameters.rope_theta", value) for value in ("1e6", True, float("inf"))),
    *(("tie_word_embeddings", value) for value in ("false", 1, 0.0)),
    *(("attention_bias", value) for value in ("false", 1)),
]


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        (family, *case)
        for family in CONFIGS
        for case in NOT_NUMBERS
        if (family, case[0]) != ("qwen2", "attention_bias")  # which Qwen2 does not read
    ],
)
def test_what_is_no_number_or_none_of_that_kind_is_refused_by_its_name(family, name, value):
    with pytest.raises(ConfigError) as refused:
        config_from_hf(with_change(CONFIGS[family], name, value))
    assert name.rpartition(".")[2] in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("family", CONFIGS)
def test_a_whole_number_is_a_fraction_and_what_nobody_reads_may_be_anything(family):
    raw = with_change(CONFIGS[family], "rope_parameters.rope_theta", 1000)
    if family != "glm4" and family != "glm4_moe":
        raw["model_max_length"] = 10**30
        raw["time_step_limit"] = float("inf")
    assert config_from_hf(raw).rope_theta == 1000.0


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("value", ["48", True, 48.0, float("nan"), 10**400])
def test_they_are_not_counted_either(family, value):
    with pytest.raises(ConfigError, match="hidden_size"):
        take_census(with_change(CONFIGS[family], "hidden_size", value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_channels", "8"),
        ("layernorm_epsilon", "1e-5"),
        ("num_layers", True),
        ("add_qkv_bias", 1),
    ],
)
def test_the_elders_are_read_as_strictly(name, value):
    with pytest.raises(ConfigError, match=name):
        read_chatglm_config({**chatglm_cases.CONFIG, name: value})


@pytest.mark.parametrize(
    ("make", "changes", "fields"),
    [
        (small_llama, {"hidden_size": 10**9}, "hidden_size=1000000000"),
        (small_llama, {"vocab_size": 2**40}, "vocab_size=1099511627776"),
        (small_llama, {"intermediate_size": 10**12}, "intermediate_size=1000000000000"),
        (small_glm, {"n_routed_experts": 10**11}, "n_routed_experts=100000000000"),
        (small_glm, {"num_attention_heads": 10**9}, "num_attention_heads=1000000000"),
    ],
)
def test_weights_beyond_the_memory_are_refused_before_any_of_it_is_taken(make, changes, fields):
    for attempt in (build_without_memory, lambda config: build_model(config, seed=0)):
        with pytest.raises(ResourceError) as refused:
            attempt(make(**changes))
        said = str(refused.value)
        assert fields in said
        assert re.search(
            r"take [\d,.]+ (GB|TB|PB|EB), but [\d,.]+ [kMGT]B of memory are avail", said
        )
        assert "num_hidden_layers=" in said


def test_shapes_that_no_tensor_can_have_name_the_sizes():
    config = small_glm(n_routed_experts=2**40, moe_intermediate_size=2**40)
    with pytest.raises(
        ConfigError, match=r"no model can have these sizes: moe_intermediate_size=\d+, n_routed"
    ):
        build_model(config, seed=0)


def test_what_fits_to_the_byte_is_built():
    weights = {"a": torch.empty(4, 8, device="meta"), "b": torch.empty(2, device="meta")}
    check_room(weights, {"width": 8}, available=136)
    with pytest.raises(
        ResourceError, match=r"136 bytes, but 135 bytes .*of shape \[4, 8\]; .*width=8"
    ):
        check_room(weights, {"width": 8}, available=135)


def test_the_system_says_how_much_memory_there_is():
    assert 0 < available_bytes() < 2**60


@pytest.fixture
def directory(tmp_path):
    """A directory whose config asks for more than any memory."""
    save_pretrained_dir(build_model(small_llama(vocab_size=512), seed=0), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "intermediate_size": 10**12}))
    return tmp_path


def test_a_directory_that_asks_for_too_much_is_not_loaded_and_no_run_begins(directory):
    with pytest.raises(ResourceError, match="intermediate_size=1000000000000"):
        load_pretrained_dir(directory)
    (directory / "recipe.toml").write_text(
        f"""
name = "r"
threads = 1
[initial]
path = "{directory}"
[tokenizer]
path = "{directory}/tokenizer.json"
[stages.midtrain]
kind = "midtrain"
num_steps = 1
context_tokens = 64
"""
    )
    small_tokenizer().save(directory / "tokenizer.json")
    recipe = load_settings(Recipe, directory / "recipe.toml")
    with pytest.raises(ResourceError, match="intermediate_size=1000000000000"):
        check_recipe(recipe, is_new=True)


def test_an_engine_server_does_not_begin_with_it(directory, capsys):
    assert main(["serve", str(directory), "--engine-only", "--port", "0"]) == 3
    assert "intermediate_size=1000000000000" in capsys.readouterr().err


def test_a_transformers_model_beyond_the_memory_is_refused():
    pytest.importorskip("transformers")
    config = config_from_hf({**CONFIGS["glm4"], "intermediate_size": 10**10})
    with pytest.raises(ResourceError, match="intermediate_size=10000000000"):
        build_model(config, seed=0)


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("make", [small_glm, small_llama])
@pytest.mark.parametrize("num_pages", [10**11, 2**58])
def test_a_cache_beyond_the_memory_names_what_to_lower(native, make, num_pages, monkeypatch):
    monkeypatch.setenv("LONGARC_NATIVE", native)
    with pytest.raises(
        ResourceError, match=rf"cache of {64 * num_pages} tokens.*engine\.cache_tokens"
    ):
        build_model(make(), seed=0).new_cache(4, 64, num_pages=num_pages)
