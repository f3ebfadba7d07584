import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longarc.errors import CheckpointError, ConfigError
from longarc.models.build import build_model
from longarc.models.hf_weights import (
    load_pretrained_dir,
    load_weights,
    save_pretrained_dir,
    save_weights,
)
from longarc.models.layout import Layout
from model_cases import small_glm, small_llama


def states_are_equal(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_one_seed_gives_one_model_and_another_another():
    assert states_are_equal(build_model(small_glm(), seed=1), build_model(small_glm(), seed=1))
    assert not states_are_equal(build_model(small_glm(), seed=1), build_model(small_glm(), seed=2))


def test_building_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    build_model(small_glm(), seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bfloat16_model_is_the_rounded_fp32_model(make_ids):
    low = build_model(small_glm(), seed=1, dtype=torch.bfloat16)
    high = build_model(small_glm(), seed=1)
    for (name, a), b in zip(low.named_parameters(), high.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16()), name
    assert low.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    output = low(make_ids(40), Layout.documents([40])).hidden
    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()


def test_weights_come_back_bitwise(decoder, tmp_path):
    save_weights(decoder, tmp_path / "w.safetensors")
    other = build_model(decoder.config, seed=77)
    load_weights(other, tmp_path / "w.safetensors")
    assert states_are_equal(decoder, other)
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_experts_have_their_own_names_on_disk(glm, tmp_path):
    save_weights(glm, tmp_path / "w.safetensors")
    tensors = load_file(tmp_path / "w.safetensors")
    stacked = glm.model.layers[2].mlp.experts
    name = "model.layers.2.mlp.experts.4"
    assert torch.equal(tensors[f"{name}.gate_proj.weight"], stacked.gate_up_proj[4, :24])
    assert torch.equal(tensors[f"{name}.up_proj.weight"], stacked.gate_up_proj[4, 24:])
    assert torch.equal(tensors[f"{name}.down_proj.weight"], stacked.down_proj[4])
    assert not any(key.endswith("gate_up_proj") for key in tensors)


def test_a_tied_head_is_stored_once(tmp_path):
    model = build_model(small_llama(tie_word_embeddings=True), seed=0)
    save_weights(model, tmp_path / "w.safetensors")
    assert "lm_head.weight" not in load_file(tmp_path / "w.safetensors")
    other = build_model(small_llama(tie_word_embeddings=True), seed=1)
    load_weights(other, tmp_path / "w.safetensors")
    assert torch.equal(other.output_weight, model.output_weight)
    assert other.output_weight is other.model.embed_tokens.weight


def test_a_truncated_file_is_refused(llama, tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(llama, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"w\.safetensors cannot be read"):
        load_weights(llama, path)


def test_a_missing_file_is_refused(llama, tmp_path):
    with pytest.raises(CheckpointError, match="missing, truncated"):
        load_weights(llama, tmp_path / "none.safetensors")


def test_wrong_tensors_are_named_and_nothing_is_loaded(llama, tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(build_model(llama.config, seed=50), path)
    good = load_file(path)
    before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}

    save_file({k: v for k, v in good.items() if k != "model.norm.weight"}, path)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .*model\.norm\.weight"):
        load_weights(llama, path)
    save_file({**good, "model.extra": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"model\.extra.*\[3\]"):
        load_weights(llama, path)
    save_file({**good, "model.norm.weight": torch.zeros(7)}, path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[7\].*\[32\]"):
        load_weights(llama, path)
    assert all(torch.equal(before[name], t) for name, t in llama.state_dict().items())


def test_a_directory_gives_back_config_and_weights(decoder, tmp_path):
    save_pretrained_dir(decoder, tmp_path / "model")
    loaded = load_pretrained_dir(tmp_path / "model")
    assert loaded.config == decoder.config
    assert states_are_equal(loaded, decoder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"indexer_types": ["shared", "full", "full"]}, "layer 0 is shared"),
        ({"indexer_types": ["full", "shared"]}, "describes 2 layers"),
        ({"indexer_types": ["full", "half", "full"]}, "indexer_types"),
        ({"indexer_types": 3}, "indexer_types"),
        ({"n_group": 8}, "n_group=8"),
        ({"num_experts_per_tok": 60}, "exceeds n_routed_experts"),
    ],
)
def test_an_architecture_that_cannot_be_built_is_refused(glm, tmp_path, change, message):
    save_pretrained_dir(glm, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_pretrained_dir(tmp_path)


@pytest.mark.parametrize("damage", ["no config", "no weights", "bad json"])
def test_a_damaged_directory_is_refused(llama, tmp_path, damage):
    save_pretrained_dir(llama, tmp_path)
    match damage:
        case "no config":
            (tmp_path / "config.json").unlink()
        case "no weights":
            (tmp_path / "model.safetensors").unlink()
        case _:
            (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json|safetensors"):
        load_pretrained_dir(tmp_path)
