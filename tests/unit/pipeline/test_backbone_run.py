"""The recipe that fine-tunes GLM-4 to 4.7, on small directories: every stage, and what is refused before it."""

import asyncio
import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longarc.cli.main import main
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.errors import CheckpointError, ConfigError
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from longarc.pipeline.local import open_workspace, run_recipe
from longarc.pipeline.midtrain import with_rope_theta
from longarc.pipeline.preflight import check_recipe
from longarc.pipeline.progress import ProgressLine
from longarc.runs.directory import RunDirectory
from longarc.runs.metrics import read_metrics
from longarc.tokens.tokenizer import Tokenizer
from transformers_cases import of_transformers, reference_logits, small, spread

pytest.importorskip("transformers")
RECIPE = Path(__file__).parents[3] / "recipes" / "finetune-glm4.toml"
SHORT = [
    "stages.sft.num_steps=2",
    "stages.sft.conversations_per_step=2",
    "stages.sft.optimizer={lr=1e-3,use_muon=true}",
    "stages.reasoning_rl.loop={num_steps=2,groups_per_step=1,group_size=2,max_concurrent_rollouts=4,"
    "dynamic_sampling=false}",
    "stages.reasoning_rl.rollout={max_new_tokens=8,max_context_tokens=512}",
    "stages.eval.tasks={format={}}",
    "stages.eval.tasks_per_family=1",
    "stages.eval.tasks_per_family_full=1",
    "stages.eval.rollout={max_new_tokens=8,max_context_tokens=512}",
]


def directory_of(path: Path, family="glm4_moe_lite", **changes) -> Path:
    config = small(family, vocab_size=280, max_position_embeddings=2048, **changes)
    save_pretrained_dir(spread(build_model(config, seed=1)), path)
    text = [f"The answer to task {n} is {n * n}." for n in range(200)]
    Tokenizer.train(text, vocab_size=280).save(path / "tokenizer.json")
    return path


def recipe(directory: Path, *overrides: str) -> Recipe:
    start = [f"initial.path='{directory}'", f"tokenizer.path='{directory}/tokenizer.json'"]
    return load_settings(Recipe, RECIPE, overrides=[*start, *SHORT, *overrides])


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.filterwarnings("ignore")
def test_a_directory_goes_through_every_stage_and_comes_out_as_one(tmp_path, capsys):
    start = directory_of(tmp_path / "start", carries_mtp=True)
    settings = recipe(start)
    check_recipe(settings, is_new=True)
    run_dir = tmp_path / "run"
    progress = ProgressLine(io.StringIO())
    with open_workspace(settings, run_dir, resume=False, progress=progress) as workspace:
        asyncio.run(run_recipe(workspace))
    rows = read_metrics(run_dir / "metrics.jsonl")
    mismatch = [v for row in rows for k, v in row.values.items() if "max_abs_log_ratio" in k]
    assert mismatch
    assert max(mismatch) < 1e-5

    done = main(["models", "convert", str(run_dir), str(tmp_path / "out"), "--stage=reasoning_rl"])
    assert done == 0, capsys.readouterr().err
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("start", "out"))
    assert before.keys() == after.keys()
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    carried = {name for name in before if name.startswith("model.layers.2.")}
    assert carried
    assert carried <= same
    assert "model.layers.1.mlp.experts.0.up_proj.weight" not in same
    written, read = (
        json.loads((tmp_path / d / "config.json").read_text()) for d in ("out", "start")
    )
    assert written == read
    ids = torch.arange(1, 60)
    model = load_pretrained_dir(tmp_path / "out")
    ours = project_logits(model(ids, Layout.documents([59])).hidden, model.output_weight)
    theirs = reference_logits(of_transformers(tmp_path / "out"), [ids])[0]
    torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=2e-5)
    final = RunDirectory.look(run_dir).stage("reasoning_rl").final()
    assert main(["models", "info", str(final)]) == 0
    assert "LongArc builds it: yes" in capsys.readouterr().out


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("initial.is_sparse=true", "holds a glm4_moe_lite model, which has no sparse attention"),
        ("stages.sft.int4_group_size=8", "int4_group_size=8 rounds the routed experts of family"),
        ("stages.sft.indexer_stride=2", "indexer_stride=2 has no effect, because a glm4_moe_lite"),
        ("stages.sft.indexer_loss_coeff=0.5", "indexer_loss_coeff=0.5 has no effect"),
        ("stages.sft.mtp={}", "'sft': mtp trains a layer that the model does not have"),
        ("stages.more={kind='dsa',warmup_steps=1,num_steps=1}", "glm4_moe_lite model has no ind"),
        ("stages.more={kind='mtp',num_steps=1,corpus={}}", "trains multi-token prediction, which"),
        (
            "stages.more={kind='midtrain',num_steps=1,pattern={layers='FS'}}",
            "pattern.layers='FS' replaces attention, but the layers of a glm4_moe_lite",
        ),
        ("stages.sft.activations.recomputed_layers=[5]", "layer 5 does not exist"),
        (
            "stages.eval.rollout.max_context_tokens=4096",
            "=4096 exceeds the model's longest context of 2048; lower it$",
        ),
    ],
)
def test_options_that_cannot_act_are_refused_before_the_run(override, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        check_recipe(recipe(directory_of(tmp_path), override), is_new=True)


@pytest.mark.usefixtures("two_cores")
def test_a_dense_family_has_nothing_to_balance(tmp_path):
    rate = "stages.reasoning_rl.router_bias_rate=0.1"
    with pytest.raises(
        ConfigError, match=r"router_bias_rate=0\.1 has no effect, because a glm4 mo"
    ):
        check_recipe(recipe(directory_of(tmp_path, "glm4"), rate), is_new=True)
    check_recipe(recipe(tmp_path), is_new=True)


@pytest.mark.usefixtures("two_cores")
def test_a_directory_without_a_model_is_refused_before_the_run(tmp_path):
    directory = directory_of(tmp_path)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_recipe(recipe(directory), is_new=True)


def test_a_raised_base_keeps_the_weights_and_changes_what_distant_tokens_see():
    model = spread(build_model(small("glm4_moe"), seed=1))
    raised = with_rope_theta(model, 5e6)
    assert raised.config.rope_theta == 5e6
    assert with_rope_theta(raised, 5e6) is raised
    ids, layout = torch.arange(60), Layout.documents([60])
    with torch.no_grad():
        before, after = model(ids, layout).hidden, raised(ids, layout).hidden
    torch.testing.assert_close(before[0], after[0])
    assert (before[-1] - after[-1]).abs().max() > 1e-3
