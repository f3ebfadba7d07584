"""config.json of Llama, Qwen2 and Qwen3: what it leaves out, what is refused, and files that do not fit it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longarc.errors import CheckpointError, ConfigError
from longarc.models.build import build_model
from longarc.models.hf_config import config_from_hf, config_to_hf
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from model_cases import small_llama, small_qwen

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
TYPES = ["llama", "qwen2", "qwen3"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TYPES)
def test_what_a_file_leaves_out_is_what_transformers_takes(model_type):
    transformers = pytest.importorskip("transformers")
    raw = SHAPE | {"model_type": model_type}
    theirs = transformers.AutoConfig.for_model(**raw).to_dict()
    ours = config_to_hf(config_from_hf(raw), dtype="float32")
    for name in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert ours[name] == theirs[name], name
    assert ours["head_dim"] == theirs.get("head_dim", 8)
    assert ours["rope_parameters"] == theirs["rope_parameters"]


def test_a_llama_without_key_heads_has_as_many_as_heads():
    raw = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    assert config_from_hf(raw | {"model_type": "llama"}).num_key_value_heads == 4
    with pytest.raises(ConfigError, match="qwen2 model names no num_key_value_heads"):
        config_from_hf(raw | {"model_type": "qwen2"})


@pytest.mark.parametrize("name", [n for n in SHAPE if n != "num_key_value_heads"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_file_without_a_size_is_refused(model_type, name):
    raw = {**SHAPE, "model_type": model_type, name: None}
    with pytest.raises(ConfigError, match=f"{model_type} model names no {name}"):
        config_from_hf(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*supported: 'silu'"),
        ({"mlp_bias": True}, "mlp_bias=True.*supported: False"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_window=8, max_window_layers=1 .*full attention in every layer",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types with sliding_attention.*full attention in every layer",
        ),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types with chunked_attention"),
    ],
)
def test_what_is_not_built_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(SHAPE | {"model_type": "qwen2"} | change)


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_that_no_layer_has_is_none(change):
    raw = SHAPE | {"model_type": "qwen2"}
    assert config_from_hf(raw | change) == config_from_hf(raw)


def test_norms_with_biases_of_the_inputs_alone_have_no_name():
    with pytest.raises(ConfigError, match="no Hugging Face architecture: Qwen3"):
        config_to_hf(small_qwen(attention_bias="inputs"), dtype="float32")


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        (small_llama(attention_bias="inputs"), "model.layers.1.self_attn.k_proj.bias", [16]),
        (small_llama(attention_bias="all"), "model.layers.0.self_attn.o_proj.bias", [32]),
        (small_llama(qk_norm=True), "model.layers.1.self_attn.q_norm.weight", [8]),
    ],
)
def test_files_that_do_not_fit_say_which_tensor_and_what_it_should_be(
    config, name, shape, tmp_path
):
    save_pretrained_dir(build_model(config, seed=0), tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    assert list(good[name].shape) == shape

    save_file({**good, name: torch.zeros(7)}, path)
    with pytest.raises(CheckpointError) as wrong:
        load_pretrained_dir(tmp_path)
    assert all(part in str(wrong.value) for part in (name, "[7]", str(shape)))

    save_file({k: v for k, v in good.items() if k != name}, path)
    with pytest.raises(CheckpointError, match="lacks 1 tensors") as missing:
        load_pretrained_dir(tmp_path)
    assert name in str(missing.value)
    assert str(shape) in str(missing.value)

    raw = json.loads((tmp_path / "config.json").read_text())
    plain = raw | {"model_type": "llama", "attention_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    save_file(good, path)
    with pytest.raises(CheckpointError, match="tensors this model does not have"):
        load_pretrained_dir(tmp_path)
