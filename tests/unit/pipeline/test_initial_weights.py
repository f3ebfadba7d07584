"""A recipe that starts from a Hugging Face directory trains it, and evaluates it before and after."""

import asyncio
import io
import json
import shutil

import orjson
import pytest

from longarc.config.recipe import INITIAL, Recipe
from longarc.errors import CheckpointError, ConfigError, ResourceError
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.pipeline.evaluation import evaluate, matrix_lines
from longarc.pipeline.local import open_workspace, run_recipe
from longarc.pipeline.preflight import check_recipe
from longarc.pipeline.progress import ProgressLine
from longarc.pipeline.replay import replay_step
from longarc.pipeline.workspace import load_checkpoint
from longarc.runs.directory import RunDirectory
from longarc.viewer.matrix import matrix, read_evaluations
from model_cases import sharpened, small_qwen
from token_samples import small_tokenizer

TASKS = {"format": {}}
STAGES = {
    "sft": {"kind": "sft", "num_steps": 1, "conversations_per_step": 2, "tasks": TASKS},
    "eval": {
        "kind": "eval",
        "stages": [INITIAL, "sft"],
        "tasks": TASKS,
        "tasks_per_family": 2,
        "max_concurrent_rollouts": 2,
        "rollout": {"max_new_tokens": 4, "max_context_tokens": 512},
    },
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights")
    tokenizer = small_tokenizer()
    tokenizer.save(directory / "tokenizer.json")
    config = small_qwen(vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    save_pretrained_dir(sharpened(build_model(config, seed=1)), directory)
    return directory


def recipe(weights):
    return Recipe.model_validate(
        {
            "name": "r",
            "threads": 1,
            "sinks": [],
            "initial": {"path": str(weights)},
            "tokenizer": {"path": str(weights / "tokenizer.json")},
            "engine": {"cache_tokens": 2048, "max_running": 2},
            "tasks": {"format": {"path": "longarc.envs.tasks.format:Format"}},
            "stages": STAGES,
        }
    )


def opened(weights, run_dir):
    progress = ProgressLine(io.StringIO())
    return open_workspace(recipe(weights), run_dir, resume=run_dir.exists(), progress=progress)


def test_the_evaluation_begins_with_the_weights_that_were_given(weights, tmp_path):
    with opened(weights, tmp_path / "run") as workspace:
        asyncio.run(run_recipe(workspace))
    run = RunDirectory.look(tmp_path / "run")
    cells = orjson.loads((run.stage("eval").path / "results.json").read_bytes())["cells"]
    assert [(cell["stage"], cell["policy_version"]) for cell in cells] == [(INITIAL, 0), ("sft", 1)]
    assert [line.split()[0] for line in matrix_lines(cells)[1:3]] == [INITIAL, "sft"]
    shown = matrix("eval", read_evaluations(run)["eval"], [INITIAL, *STAGES])
    assert shown["stages"] == [INITIAL, "sft"]

    given, imported = (
        load_pretrained_dir(weights),
        load_checkpoint(run.stage(INITIAL).final()).model,
    )
    assert imported.config == given.config
    trained = load_checkpoint(run.stage("sft").final()).model
    save_pretrained_dir(trained, tmp_path / "trained")
    raw = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert raw["model_type"] == "qwen3"
    for name, tensor in given.state_dict().items():
        assert (imported.state_dict()[name] == tensor).all()
        assert not (trained.state_dict()[name] == tensor).all(), name


def test_given_weights_are_evaluated_before_anything_was_trained(weights, tmp_path):
    with opened(weights, tmp_path / "run") as workspace:
        config = workspace.recipe.stages["eval"]
        path = asyncio.run(
            evaluate(
                workspace, "eval-1", config, stages=[INITIAL], families=["format"], num_tasks=1
            )
        )
    (cell,) = orjson.loads(path.read_bytes())["cells"]
    assert (cell["stage"], cell["num_graded"]) == (INITIAL, 1)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_a_directory_without_a_model_is_refused_before_there_is_a_run(weights, tmp_path, broken):
    copy = tmp_path / "weights"
    shutil.copytree(weights, copy)
    (copy / broken).unlink()
    with pytest.raises(CheckpointError, match="weights"):
        check_recipe(recipe(copy), is_new=True)
    shutil.copy(weights / broken, copy / broken)
    check_recipe(recipe(copy), is_new=True)


def test_a_tokenizer_that_the_model_has_no_rows_for_is_refused_before_there_is_a_run(
    weights, tmp_path
):
    config = small_qwen(vocab_size=300, max_position_embeddings=512)
    save_pretrained_dir(build_model(config, seed=1), tmp_path)
    shutil.copy(weights / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match=r"given model's vocab_size=300: .* Use the model's own"):
        check_recipe(recipe(tmp_path), is_new=True)


def test_a_start_that_fails_on_what_the_recipe_names_can_be_given_again(weights, tmp_path):
    copy = tmp_path / "weights"
    shutil.copytree(weights, copy)
    (copy / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError), opened(copy, tmp_path / "run") as workspace:
        asyncio.run(run_recipe(workspace))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    progress = ProgressLine(io.StringIO())
    with open_workspace(recipe(weights), tmp_path / "run", resume=False, progress=progress):
        pass


def test_a_run_with_results_outlives_an_error_of_its_recipe(weights, tmp_path):
    def fail_later():
        with opened(weights, tmp_path / "run") as workspace:
            assert workspace.final(INITIAL).is_dir()
            raise ConfigError("a later stage")

    with pytest.raises(ConfigError, match="a later stage"):
        fail_later()
    assert RunDirectory.look(tmp_path / "run").stage(INITIAL).final() is not None


def test_an_error_of_the_machine_leaves_the_run_to_be_resumed(weights, tmp_path):
    with pytest.raises(ResourceError), opened(weights, tmp_path / "run"):
        raise ResourceError("the disk is full")
    with opened(weights, tmp_path / "run"):
        pass


def test_a_step_of_a_first_stage_is_taken_again_from_the_weights_that_were_given(weights, tmp_path):
    """There is no training stage before it whose checkpoint it began with."""
    tree = recipe(weights).model_dump(mode="json")
    tree["stages"] = {
        "reasoning_rl": {
            "kind": "reasoning_rl",
            "tasks": TASKS,
            "loop": {
                "num_steps": 1,
                "groups_per_step": 1,
                "group_size": 2,
                "max_concurrent_rollouts": 2,
                "dynamic_sampling": False,
            },
            "rollout": {"max_new_tokens": 4, "max_context_tokens": 512},
        }
    }
    settings, progress = Recipe.model_validate(tree), ProgressLine(io.StringIO())
    with open_workspace(settings, tmp_path / "run", resume=False, progress=progress) as workspace:
        asyncio.run(run_recipe(workspace))
    recorded, computed = replay_step(settings, tmp_path / "run", "reasoning_rl:0")
    assert recorded.weights_sha256 == computed.weights_sha256
