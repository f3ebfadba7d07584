import json

import pytest
import torch
from safetensors.torch import load_file

from longarc.cli.main import main
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_weights
from longarc.models.layout import Layout
from longarc.runs.directory import RunDirectory
from model_cases import small_glm


@pytest.fixture
def model():
    return build_model(small_glm(), seed=0)


@pytest.fixture
def run(tmp_path, model):
    """Return a run whose stage ``sft`` has a final checkpoint."""
    path = tmp_path / "run"
    recipe = {"name": "r", "stages": {"sft": {}}}
    with RunDirectory.create(path, recipe=recipe, seeds={"run": 0}) as run:
        checkpoint = (
            run.stage("sft")
            .writer(keep_last=1)
            .write(
                lambda directory: save_weights(model, directory / "model.safetensors"),
                kind="supervised",
                stage="sft",
                step=1,
                policy_version=1,
                model=model.config.model_dump(),
                tokenizer_sha256=None,
            )
        )
        run.stage("sft").set_final(checkpoint)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_stage_becomes_a_directory_that_can_be_loaded(run, model, tmp_path, capsys):
    assert main(["models", "convert", str(run), str(tmp_path / "out"), "--stage", "sft"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"{tmp_path}/out: config.json, model.safetensors, tokenizer.json\n"
    loaded = load_pretrained_dir(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_stage_is_exported_as_int4(run, model, tmp_path):
    target = tmp_path / "out"
    options = ["--stage", "sft", "--int4-group-size", "8"]
    assert main(["models", "convert", str(run), str(target), *options]) == 0
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 8
    assert "model.layers.1.mlp.experts.0.up_proj.weight_packed" in load_file(
        target / "model.safetensors"
    )
    ids = torch.arange(40)
    trained = model(ids, Layout.documents([40]), int4_group_size=8).hidden
    assert torch.equal(load_pretrained_dir(target)(ids, Layout.documents([40])).hidden, trained)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("0", "a group holds at least one number"),
        ("7", "INT4 groups of 7 numbers do not fit 'model.layers.1.mlp.experts.0."),
        ("48", "INT4 groups of 48 numbers do not fit 'model.layers.1.mlp.experts.0."),
    ],
)
def test_a_group_size_that_does_not_fit_is_refused(run, tmp_path, size, message, capsys):
    options = ["--stage", "sft", "--int4-group-size", size]
    assert main(["models", "convert", str(run), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
