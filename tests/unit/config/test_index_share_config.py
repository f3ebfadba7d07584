"""Which layers have an indexer: the rules of transformers, and what fits no model."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from longarc.config.index_share import (
    check_layer_split,
    indexer_kinds,
    kinds_of,
    layers_served,
    pattern_of,
)
from longarc.config.model import GlmMoeDsaConfig
from longarc.errors import ConfigError
from model_cases import small_glm

GLM_5_2 = json.loads(
    (Path(__file__).parents[1] / "models" / "configs" / "glm_5_2.json").read_text()
)


def test_every_layer_has_an_indexer_unless_told_otherwise():
    assert GlmMoeDsaConfig().indexer_kinds == ("full",) * 4


def test_frequency_and_offset_give_the_layers_that_glm_5_2_lists():
    kinds = indexer_kinds(78, frequency=4, offset=3)
    assert kinds == tuple(GLM_5_2["indexer_types"])
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [0, 1, *range(2, 78, 4)]


@pytest.mark.parametrize("frequency", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
@pytest.mark.filterwarnings("ignore")
def test_the_schedule_is_the_one_of_transformers(frequency, offset):
    transformers = pytest.importorskip("transformers")
    config = transformers.GlmMoeDsaConfig(
        num_hidden_layers=8, index_topk_freq=frequency, index_skip_topk_offset=offset
    )
    assert indexer_kinds(8, frequency=frequency, offset=offset) == tuple(config.indexer_types)


def test_a_pattern_goes_before_frequency_and_a_list_says_the_same():
    config = small_glm(index_topk_freq=3, index_topk_pattern="FSS")
    assert config.indexer_kinds == ("full", "shared", "shared")
    assert config.indexed_layers == (0,)
    assert small_glm(indexer_types=["full", "shared", "shared"]).indexer_kinds == (
        config.indexer_kinds
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_topk_pattern": "SFF"}, r"layer 0 is shared in 'SFF'.* an F in front"),
        ({"indexer_types": ["shared", "full", "full"]}, "layer 0 is shared in 'SFF'"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_skip_topk_offset of at least"),
        ({"index_topk_pattern": "FS"}, "'FS' describes 2 layers, but num_hidden_layers=3"),
        ({"indexer_types": ["full"] * 4}, "'FFFF' describes 4 layers"),
        ({"index_topk_pattern": "FXS"}, "index_topk_pattern"),
        ({"index_topk_pattern": "FFS", "indexer_types": ["full"] * 3}, "leave one of them out"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
    ],
)
def test_a_schedule_that_fits_no_model_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        small_glm(**fields)


def test_layers_between_two_indexers_use_one_selection():
    kinds = kinds_of("FFSSFS")
    assert [layers_served(kinds, layer) for layer in range(6)] == [
        range(1),
        *[range(1, 4)] * 3,
        *[range(4, 6)] * 2,
    ]
    assert layers_served(kinds, 6) == range(6, 7)  # a layer for multi-token prediction
    assert pattern_of(kinds) == "FFSSFS"


def test_the_published_split_of_glm_5_2_begins_no_stage_on_a_shared_layer():
    starts = [0, *range(14, 62 + 1, 8)]
    check_layer_split(GLM_5_2["indexer_types"], starts)
    assert len(starts) == 8


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 2], "begins at layer 2, which reuses the selection of layer 1 .* at layer 1 or 4"),
        ([0, 4, 5], "begins at layer 5, which reuses the selection of layer 4 .* at layer 4$"),
        ([0, 6], r"layers 0\.\.5"),
        ([1, 4], "do not divide the model"),
        ([0, 4, 1], "ascending"),
        ([0, 4, 4], "ascending"),
        ([], "the first of them 0"),
    ],
)
def test_a_split_that_begins_on_a_shared_layer_is_refused(starts, message):
    check_layer_split(kinds_of("FFSSFS"), [0, 1, 4])
    with pytest.raises(ConfigError, match=message):
        check_layer_split(kinds_of("FFSSFS"), starts)


@pytest.mark.parametrize("pattern", ["", "FXS", "fs"])
def test_letters_that_say_no_kind_are_refused(pattern):
    with pytest.raises(ConfigError, match="write one letter for each"):
        kinds_of(pattern)
