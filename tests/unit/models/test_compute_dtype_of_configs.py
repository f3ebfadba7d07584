"""Where ``compute_dtype`` comes from, where it goes, and who refuses it."""

import json

import pytest
import torch
from pydantic import ValidationError

from longarc.config.model import AttentionPattern, LlamaHybridConfig
from longarc.errors import ConfigError
from longarc.models.build import build_model
from longarc.models.conversion import hybrid_config
from longarc.models.hf_config import computing_in, config_from_hf, config_to_hf
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from model_cases import small_glm, small_llama, small_qwen


@pytest.mark.parametrize("make", [small_llama, small_qwen])
def test_a_hugging_face_config_carries_it_and_says_nothing_of_float32(make):
    config = make(compute_dtype="bfloat16", head_dim=8)
    raw = config_to_hf(config, dtype="float32")
    assert raw["compute_dtype"] == "bfloat16"
    assert config_from_hf(raw).compute_dtype == "bfloat16"
    assert "compute_dtype" not in config_to_hf(make(), dtype="float32")


def test_weights_stay_float32_and_whoever_loads_them_may_choose(tmp_path):
    model = build_model(small_llama(compute_dtype="bfloat16"), seed=0)
    save_pretrained_dir(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert load_pretrained_dir(tmp_path).compute_dtype == "bfloat16"
    chosen = load_pretrained_dir(tmp_path, compute_dtype="float32")
    assert chosen.compute_dtype == "float32"
    assert torch.equal(chosen.output_weight, model.output_weight)


def test_a_dtype_that_is_not_built_is_refused_by_name():
    with pytest.raises(ConfigError, match="does not describe a model that can be built"):
        config_from_hf(config_to_hf(small_llama(), dtype="float32") | {"compute_dtype": "float16"})


def test_families_that_compute_in_float32_say_so():
    pattern = AttentionPattern(layers="FS")
    assert computing_in(small_glm(), "float32") == small_glm()
    with pytest.raises(ConfigError, match="this is a glm_moe_dsa model"):
        computing_in(small_glm(), "bfloat16")
    with pytest.raises(ValidationError, match="leave it out for a llama_hybrid model"):
        LlamaHybridConfig(num_hidden_layers=2, pattern=pattern, compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match="a hybrid, which computes in float32"):
        hybrid_config(small_llama(compute_dtype="bfloat16"), pattern)
