"""The stage that trains drafts: on a frozen model, exactly resumable, and followed by stages that keep them."""

import asyncio
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError
from longarc.models.build import build_model
from longarc.models.hf_weights import save_pretrained_dir
from longarc.pipeline.local import Interrupted, open_workspace, run_recipe
from longarc.pipeline.progress import ProgressLine
from longarc.runs.checkpoint import read_manifest
from longarc.runs.directory import RunDirectory
from longarc.runs.metrics import read_metrics

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke.toml"
CORPUS = {"max_bytes": 200_000, "copy_share_frac": 0.6}
SHORT = {"context_tokens": 64, "tokens_per_step": 256, "corpus": CORPUS}
STAGES = {
    "pretrain": {"kind": "pretrain", "num_steps": 2, **SHORT},
    "mtp": {
        "kind": "mtp",
        "num_steps": 4,
        "num_depths": 2,
        "optimizer": {"lr": 1e-4},
        "checkpoint_every_steps": 1,
        **SHORT,
    },
    "sft": {
        "kind": "sft",
        "num_steps": 1,
        "conversations_per_step": 2,
        "tasks": {"format": {}},
        "mtp": {"weight": 0.1, "loss": "end_to_end_tv", "trains_trunk": False},
    },
}


def recipe(**changes):
    base = load_settings(Recipe, SMOKE).model_dump(mode="json")
    base["tokenizer"]["training_bytes"] = 50_000
    return Recipe.model_validate(base | {"stages": STAGES} | changes)


class StopsAfter(ProgressLine):
    """Asks the run to stop once a step of the mtp stage is done, as Ctrl-C would."""

    workspace = None

    def __init__(self, step):
        super().__init__(io.StringIO())
        self.step = step

    def update(self, *, stage, step, num_steps, metrics):
        if (stage, step) == ("mtp", self.step):
            self.workspace.stop.set()


def run(settings, run_dir, *, stop_after=None):
    progress = StopsAfter(stop_after)
    with open_workspace(settings, run_dir, resume=run_dir.exists(), progress=progress) as workspace:
        progress.workspace = workspace
        asyncio.run(run_recipe(workspace))


def final(run_dir, stage):
    return RunDirectory.look(run_dir).stage(stage).final()


def tensors(run_dir, stage):
    return load_file(final(run_dir, stage) / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("mtp") / "run"
    run(recipe(), run_dir)
    return run_dir


def test_the_finished_model_stays_as_it_was_and_drafts_are_new(finished):
    before, after = tensors(finished, "pretrain"), tensors(finished, "mtp")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    new = after.keys() - before.keys()
    assert "model.layers.3.eh_proj.weight" in new
    assert all(name.startswith("model.layers.3.") for name in new)
    manifest = read_manifest(final(finished, "mtp"))
    assert manifest.model["num_nextn_predict_layers"] == 1
    assert manifest.model["mtp_num_depths"] == 2


def test_drafts_start_from_the_last_layer(finished):
    before, after = tensors(finished, "pretrain"), tensors(finished, "mtp")
    name = "self_attn.o_proj.weight"
    moved = after[f"model.layers.3.{name}"] - before[f"model.layers.2.{name}"]
    assert 0 < moved.abs().max() < 0.1 * before[f"model.layers.2.{name}"].std()


def test_a_later_stage_trains_them_along(finished):
    before, after = tensors(finished, "mtp"), tensors(finished, "sft")
    assert before.keys() == after.keys()
    assert not torch.equal(
        before["model.layers.3.eh_proj.weight"], after["model.layers.3.eh_proj.weight"]
    )


def test_metrics_say_what_drafts_are_worth(finished):
    rows = [row for row in read_metrics(finished / "metrics.jsonl") if row.stage == "mtp"]
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert all(1 <= row.values["mtp/accept_length_tokens"] <= 3 for row in rows)
    assert "mtp/acceptance_frac/depth_2" in rows[0].values
    assert "mtp/acceptance_frac/depth_3" not in rows[0].values


def test_a_stage_that_was_stopped_and_resumed_ends_bit_identical(finished, tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(recipe(), run_dir, stop_after=2)
    assert final(run_dir, "mtp") is None
    run(recipe(), run_dir)
    for stage in ("mtp", "sft"):
        ours, theirs = tensors(run_dir, stage), tensors(finished, stage)
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_imported_weights_without_drafts_cannot_train_them_along(finished, tmp_path):
    model = recipe().model
    save_pretrained_dir(build_model(model, seed=0), tmp_path / "weights")
    settings = recipe(
        stages={"sft": STAGES["sft"]},
        initial={"path": str(tmp_path / "weights")},
        tokenizer={"path": str(finished / "tokenizer.json")},
    )
    with pytest.raises(ConfigError, match="'sft': mtp trains a layer that the weights before it"):
        run(settings, tmp_path / "run")
