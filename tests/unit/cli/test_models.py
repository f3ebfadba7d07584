import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longarc.cli.main import main
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_weights
from longarc.models.layout import Layout
from longarc.runs.directory import RunDirectory
from model_cases import small_glm

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def model():
    return build_model(small_glm(), seed=0)


@pytest.fixture(params=[None])
def int4_group_size(request):
    """Of the stage's training; None for none."""
    return request.param


@pytest.fixture
def run(tmp_path, model, int4_group_size):
    """Return a run whose stage ``sft`` has a final checkpoint."""
    path = tmp_path / "run"
    smoke = load_settings(Recipe, RECIPES / "smoke.toml")
    recipe = smoke.model_dump(mode="json")
    recipe["stages"]["sft"]["int4_group_size"] = int4_group_size
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


@pytest.mark.parametrize(
    ("int4_group_size", "options", "said"),
    [
        (8, [], "as in training"),
        (8, ["--int4-group-size", "8"], "as in training"),
        (None, ["--int4-group-size", "8"], "rounded after training"),
    ],
)
def test_a_stage_is_exported_as_int4(run, model, tmp_path, options, said, capsys):
    target = tmp_path / "out"
    assert main(["models", "convert", str(run), str(target), "--stage", "sft", *options]) == 0
    assert f"routed experts in INT4, groups of 8: {said}\n" in capsys.readouterr().out
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 8
    assert "model.layers.1.mlp.experts.0.up_proj.weight_packed" in load_file(
        target / "model.safetensors"
    )
    ids = torch.arange(40)
    trained = model(ids, Layout.documents([40]), int4_group_size=8).hidden
    assert torch.equal(load_pretrained_dir(target)(ids, Layout.documents([40])).hidden, trained)


@pytest.mark.parametrize("int4_group_size", [16])
def test_codes_that_no_training_used_are_not_exported(run, tmp_path, capsys):
    options = ["--stage", "sft", "--int4-group-size", "8"]
    assert main(["models", "convert", str(run), str(tmp_path / "out"), *options]) == 2
    assert "stage 'sft' trained with int4_group_size=16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("int4_group_size", [8])
def test_the_weights_behind_the_codes_are_exported_on_request(run, model, tmp_path, capsys):
    options = ["--stage", "sft", "--unrounded"]
    assert main(["models", "convert", str(run), str(tmp_path / "out"), *options]) == 0
    assert "INT4" not in capsys.readouterr().out
    loaded = load_pretrained_dir(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_nothing_is_unrounded_where_nothing_was_rounded(run, tmp_path, capsys):
    options = ["--stage", "sft", "--unrounded"]
    assert main(["models", "convert", str(run), str(tmp_path / "out"), *options]) == 2
    assert "--unrounded has no effect: stage 'sft' did not train with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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


def test_a_run_that_lost_its_tokenizer_is_refused_before_anything_is_written(run, tmp_path, capsys):
    (run / "tokenizer.json").unlink()
    assert main(["models", "convert", str(run), str(tmp_path / "out"), "--stage", "sft"]) == 4
    assert "has no tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stage", "code", "message"),
    [
        (
            "nope",
            2,
            "stage 'nope' of RUN does not exist; name one of the training stages ['pretrain'",
        ),
        ("eval", 2, "stage 'eval' of RUN evaluates and has no weights of its own; name one of"),
        ("initial", 2, "stage 'initial' of RUN does not exist"),
        ("../..", 2, "does not exist"),
        (
            "pretrain",
            4,
            "stage 'pretrain' of RUN is not finished: it has no final checkpoint. Finished are ",
        ),
    ],
)
@pytest.mark.parametrize("action", ["convert", "share"])
def test_a_stage_without_weights_is_refused_and_those_that_have_some_are_named(
    run, tmp_path, action, stage, code, message, capsys
):
    target = [str(tmp_path / "out")] if action == "convert" else []
    assert main(["models", action, str(run), *target, "--stage", stage]) == code
    error = capsys.readouterr().err
    assert message.replace("RUN", str(run)) in error
    named = error.partition("[")[2].partition("]")[0]
    assert "'sft'" in named
    assert "'eval'" not in named
    assert not (tmp_path / "out").exists()


def test_a_run_from_weights_shows_those_it_imported_when_their_directory_is_gone(
    run, model, tmp_path, capsys
):
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["initial"] = {"path": str(tmp_path / "gone"), "is_sparse": False}
    recipe["tokenizer"]["path"] = str(run / "tokenizer.json")
    del recipe["stages"]["pretrain"]
    (run / "recipe.json").write_text(json.dumps(recipe))
    assert main(["models", "info", str(run)]) == 2
    assert "initial.path = " in capsys.readouterr().err
    (run / "stages" / "sft").rename(run / "stages" / "initial")
    assert main(["models", "info", str(run)]) == 0
    of_run = capsys.readouterr().out
    (checkpoint,) = (run / "stages" / "initial" / "checkpoints").iterdir()
    assert main(["models", "info", str(checkpoint)]) == 0
    assert capsys.readouterr().out == of_run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"family": "glm_moe_dsa", "hidden_size": 0}}, "hidden_size: Input should be"),
        ({"model": {"family": "nope"}}, "describes a model that this LongArc does not build"),
        ({"step": "many"}, "manifest.json is damaged: step: Input should be a valid integer"),
    ],
)
def test_a_manifest_that_is_wrong_is_told_in_one_line(run, change, message, capsys):
    (checkpoint,) = (run / "stages" / "sft" / "checkpoints").iterdir()
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    assert main(["models", "info", str(checkpoint)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "pydantic" not in line


def test_a_target_that_is_a_file_is_refused(run, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert main(["models", "convert", str(run), str(tmp_path / "out"), "--stage", "sft"]) == 2
    assert "out is not an empty directory; give a new one" in capsys.readouterr().err
