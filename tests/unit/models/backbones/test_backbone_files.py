"""Directories of GLM-4 to GLM-4.7: what is read, what is written again, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longarc.errors import CheckpointError, ConfigError
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, named_tensors, save_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from transformers_cases import FAMILIES, of_transformers, reference_logits, small, spread

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHTS = "model.safetensors"


def directory_of_transformers(config, path: Path) -> Path:
    """A directory that transformers wrote, from weights that LongArc drew."""
    save_pretrained_dir(spread(build_model(config, seed=1)), path / "drawn")
    of_transformers(path / "drawn").save_pretrained(path / "published")
    return path / "published"


def change_config(directory: Path, **values) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(directory: Path, **changes) -> None:
    tensors = load_file(directory / WEIGHTS) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_directory_is_read_and_written_so_that_transformers_computes_the_same(
    family, tmp_path
):
    published = directory_of_transformers(small(family, eos_token_id=[3, 5]), tmp_path)
    model = load_pretrained_dir(published)
    save_pretrained_dir(model, tmp_path / "again")

    before, after = (load_file(d / WEIGHTS) for d in (published, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == [3, 5]

    ids = torch.arange(1, 40)
    theirs = [of_transformers(d) for d in (published, tmp_path / "again")]
    first, second = (reference_logits(reference, [ids])[0] for reference in theirs)
    assert torch.equal(first, second)
    ours = project_logits(model(ids, Layout.documents([39])).hidden, model.output_weight)
    torch.testing.assert_close(ours.detach(), first, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite"])
def test_router_biases_are_kept_in_files(family, tmp_path):
    model = spread(build_model(small(family), seed=1))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = named_tensors(model)[name].clone()
    assert bias.abs().min() > 0
    save_pretrained_dir(model, tmp_path)
    assert torch.equal(load_file(tmp_path / WEIGHTS)[name], bias)
    assert torch.equal(named_tensors(load_pretrained_dir(tmp_path))[name], bias)


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite"])
def test_a_layer_for_drafts_is_carried_from_file_to_file(family, tmp_path):
    drawn = spread(build_model(small(family, carries_mtp=True), seed=1))
    save_pretrained_dir(drawn, tmp_path / "published")
    # Published files repeat the main tables there; whoever reads them shares those.
    copy = torch.ones(64, 32)
    change_tensors(tmp_path / "published", **{"model.layers.2.embed_tokens.weight": copy})
    change_config(tmp_path / "published", num_nextn_predict_layers=1)

    model = load_pretrained_dir(tmp_path / "published")
    assert model.config.carries_mtp
    save_pretrained_dir(model, tmp_path / "again")
    before, after = (load_file(tmp_path / d / WEIGHTS) for d in ("published", "again"))
    assert before.keys() - after.keys() == {"model.layers.2.embed_tokens.weight"}
    behind = [name for name in after if name.startswith("model.layers.2.")]
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"} < {*behind}
    assert all(torch.equal(after[name], before[name]) for name in behind)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 1

    without = {name: None for name in before if name.startswith("model.layers.2.")}
    change_tensors(tmp_path / "published", **without)
    assert not load_pretrained_dir(tmp_path / "published").config.carries_mtp


def test_a_damaged_layer_for_drafts_is_refused_and_not_left_out(tmp_path):
    save_pretrained_dir(build_model(small("glm4_moe", carries_mtp=True), seed=1), tmp_path)
    change_tensors(tmp_path, **{"model.layers.2.enorm.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .*model\.layers\.2\.enorm\.weight"):
        load_pretrained_dir(tmp_path)


def test_fused_experts_and_int4_experts_are_read(tmp_path):
    config = small("glm4_moe", hidden_size=32, moe_intermediate_size=16)
    model = spread(build_model(config, seed=1))
    save_pretrained_dir(model, tmp_path / "fused", experts="fused")
    loaded = load_pretrained_dir(tmp_path / "fused")
    for name, tensor in named_tensors(model).items():
        assert torch.equal(tensor, named_tensors(loaded)[name]), name
    save_pretrained_dir(model, tmp_path / "int4", experts="int4", int4_group_size=8)
    rounded = named_tensors(load_pretrained_dir(tmp_path / "int4"))
    expert = "model.layers.1.mlp.experts.0.down_proj.weight"
    exact = named_tensors(model)[expert]
    assert 0 < (rounded[expert] - exact).abs().max() < exact.abs().max() / 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "mistral"},
            "model_type 'mistral' .* supported: glm_moe_dsa, llama, qwen2, qwen3, glm, glm4",
        ),
        ({"architectures": ["Glm4ForSequenceClassification"]}, "architectures="),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size=None has to be a whole number"),
        ({"hidden_size": "wide"}, "hidden_size='wide' has to be a whole number"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": 7}, "rope_parameters=7 is no object"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 is not a multiple of num_key_value"),
        ({"rms_norm_eps": "small"}, "hf_config.rms_norm_eps: .*valid number, not .small"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config of method 'awq'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_by_name(changes, said, tmp_path):
    save_pretrained_dir(build_model(small("glm4"), seed=1), tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=said):
        load_pretrained_dir(tmp_path)


def test_tensors_of_another_shape_and_tensors_of_nothing_are_refused(tmp_path):
    save_pretrained_dir(build_model(small("glm"), seed=1), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(tmp_path, **{name: torch.zeros(32, 47)})
    with pytest.raises(CheckpointError, match=rf"{name}' has shape \[32, 47\].* needs\s\[32, 48\]"):
        load_pretrained_dir(tmp_path)
    behind = {name: torch.zeros(32, 48), "model.layers.2.mlp.down_proj.weight": torch.ones(32, 48)}
    change_tensors(tmp_path, **behind)
    with pytest.raises(ConfigError, match=r"layer 2, behind the last .* glm models have no layer"):
        load_pretrained_dir(tmp_path)
    change_tensors(tmp_path, **{"model.layers.2.mlp.down_proj.weight": None})
    change_tensors(tmp_path, **{"model.vision.weight": torch.ones(1)})
    with pytest.raises(
        CheckpointError, match=r"does not have, the first is 'model\.vision\.weight'"
    ):
        load_pretrained_dir(tmp_path)


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed .*pip install 'longarc\[train,hf\]'"):
        build_model(small("glm4"), seed=0)


def test_a_transformers_of_other_interfaces_is_refused_by_its_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ConfigError, match=r"transformers 5.* is too old; install 5\.20: "):
        build_model(small("glm4_moe"), seed=0)
