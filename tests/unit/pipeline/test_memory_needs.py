"""What a stage needs of the memory is known before the first stage, all of its parts."""

import logging
from pathlib import Path

import pytest
import torch

from longarc.config.engine import EngineConfig
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.config.training import ActivationConfig
from longarc.engine.speculation import cache_for
from longarc.errors import ResourceError
from longarc.models.build import build_model, build_without_memory
from longarc.models.layout import Layout
from longarc.models.routed_rows import RoutingShape
from longarc.pipeline.memory_needs import (
    activation_bytes_per_token,
    cache_bytes_per_token,
    check_stages_fit,
    needs_of,
    routing_bytes_per_token,
)
from longarc.pipeline.preflight import check_recipe
from model_cases import small_glm, small_llama

RECIPE = Path(__file__).parents[3] / "recipes" / "smoke.toml"
NUM_TOKENS = 128


@pytest.fixture
def recipe():
    return load_settings(Recipe, RECIPE)


def kept_bytes(model):
    """Return the bytes of all tensors but parameters that a forward pass keeps for backward."""
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(x):
        if x.data_ptr() not in parameters:
            kept[x.data_ptr(), x.shape] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(torch.zeros(NUM_TOKENS, dtype=torch.long), Layout.documents([NUM_TOKENS]))
    return sum(x.nbytes for x in kept.values())


@pytest.mark.parametrize("config", [small_glm(), small_llama()], ids=["glm", "llama"])
def test_activations_are_never_estimated_higher_than_they_are(config):
    least = activation_bytes_per_token(build_without_memory(config), ActivationConfig())
    assert least * NUM_TOKENS <= kept_bytes(build_model(config, seed=0)) <= 5 * least * NUM_TOKENS


def test_layers_that_are_computed_again_or_offloaded_count_less():
    model = build_without_memory(small_llama())
    per_token = [
        activation_bytes_per_token(model, ActivationConfig(**choice))
        for choice in ({}, {"recomputed_layers": "all"}, {"offloaded_layers": "all"})
    ]
    assert per_token[0] > per_token[1] == 2 * 32 * 4 > per_token[2] == 0


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_token_of_the_cache_takes_what_the_engines_tables_do(num_drafts, monkeypatch):
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    model = build_model(small_glm(num_nextn_predict_layers=1, index_topk_pattern="FSF"), seed=0)
    engine = EngineConfig(num_speculative_tokens=num_drafts, cache_tokens=1024, max_running=2)
    cache = cache_for(model, engine, max_context_tokens=64)
    assert cache_bytes_per_token(model, engine) * 1024 == cache.num_bytes


def replaying(recipe, kept):
    stage = recipe.stages["reasoning_rl"]
    return stage.model_copy(
        update={"rollout": stage.rollout.model_copy(update={"routing_replay": kept})}
    )


@pytest.mark.parametrize("kept", ["experts", "experts_and_keys"])
def test_what_is_kept_for_replay_is_a_part_too(recipe, kept):
    model = build_model(small_glm(), seed=0)
    cache = cache_for(model, recipe.engine, max_context_tokens=64)
    before = cache.num_bytes
    cache.keep_routing(RoutingShape.of(model.config, kept, attention="sparse"))
    stage = replaying(recipe, kept)
    per_token = routing_bytes_per_token(model, stage)
    assert per_token * cache.num_rows == cache.num_bytes - before > 0
    needs = {need.what: need.num_bytes for need in needs_of(stage, recipe, model)}
    assert needs["the routing beside it"] == per_token * recipe.engine.cache_tokens
    assert routing_bytes_per_token(model, recipe.stages["reasoning_rl"]) == 0
    assert routing_bytes_per_token(model, recipe.stages["pretrain"]) == 0


def test_gradients_moments_activations_and_the_engine_are_parts_of_it(recipe):
    model = build_without_memory(recipe.model)
    trained = [need.what for need in needs_of(recipe.stages["pretrain"], recipe, model)]
    sampled = [need.what for need in needs_of(recipe.stages["reasoning_rl"], recipe, model)]
    for part in ("weights", "gradients", "moments", "activations"):
        assert any(part in what for what in trained)
        assert any(part in what for what in sampled)
    assert any("engine's weights (2 copies" in what for what in sampled)
    assert any("engine.cache_tokens" in what for what in sampled)


def test_a_stage_that_cannot_fit_is_refused_with_its_parts_though_its_weights_would(recipe):
    model = build_without_memory(recipe.model)
    weights = sum(weight.nbytes for weight in model.state_dict().values())
    with pytest.raises(ResourceError) as raised:
        check_stages_fit(recipe, model, available=2 * weights)
    said = str(raised.value)
    assert "stage 'pretrain' needs at least" in said
    assert "gradients" in said
    assert "the optimizer's moments" in said


def test_a_cache_that_may_outgrow_the_memory_is_a_warning_that_names_the_setting(recipe, caplog):
    recipe = recipe.model_copy(
        update={"engine": recipe.engine.model_copy(update={"cache_tokens": 1 << 32})}
    )
    with caplog.at_level(logging.WARNING):
        check_stages_fit(recipe, build_without_memory(recipe.model), available=10**11)
    assert "stage 'reasoning_rl' may come to need" in caplog.text
    assert "lower engine.cache_tokens" in caplog.text


def test_a_recipe_that_fits_says_nothing(recipe, caplog):
    with caplog.at_level(logging.WARNING):
        check_stages_fit(recipe, build_without_memory(recipe.model), available=10**11)
    assert not caplog.records


def test_a_run_is_refused_before_it_begins(recipe, monkeypatch):
    weights = sum(w.nbytes for w in build_without_memory(recipe.model).state_dict().values())
    monkeypatch.setattr("longarc.pipeline.memory_needs.available_bytes", lambda: 2 * weights)
    with pytest.raises(ResourceError, match="stage 'pretrain' needs at least"):
        check_recipe(recipe, is_new=True)


def test_a_cache_that_no_process_can_address_is_refused(recipe):
    engine = recipe.engine.model_copy(update={"cache_tokens": 10**14})
    recipe = recipe.model_copy(update={"engine": engine})
    with pytest.raises(
        ResourceError, match=r"'reasoning_rl' needs .* or lower engine\.cache_tokens"
    ):
        check_stages_fit(recipe, build_without_memory(recipe.model), available=10**11)
