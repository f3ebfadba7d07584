"""RL that replays the engine's routing, as a recipe asks for it: real stages on a small model."""

import asyncio
import io
from pathlib import Path

import pytest

from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.models.build import build_model
from longarc.models.hf_weights import save_pretrained_dir
from longarc.models.kernels.native import native
from longarc.pipeline.local import open_workspace, run_recipe
from longarc.pipeline.progress import ProgressLine
from longarc.pipeline.replay import replay_step
from longarc.runs.directory import RunDirectory
from longarc.runs.metrics import read_metrics
from longarc.tokens.tokenizer import Tokenizer
from model_cases import sharpened, small_glm

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke.toml"
LOOP = {
    "num_steps": 3,
    "groups_per_step": 2,
    "group_size": 2,
    "max_lag_steps": 1,
    "max_concurrent_rollouts": 8,
    "dynamic_sampling": False,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a directory with a model that attends sparsely, and its tokenizer."""
    path = tmp_path_factory.mktemp("start")
    config = small_glm(vocab_size=280, max_position_embeddings=1024, index_topk=32)
    save_pretrained_dir(sharpened(build_model(config, seed=1)), path)
    text = [f"The answer to task {n} is {n * n}." for n in range(200)]
    Tokenizer.train(text, vocab_size=280).save(path / "tokenizer.json")
    return path


def ran(start, run_dir, replay, **engine):
    """Run the stage; return its recipe, and the largest difference of each step."""
    base = load_settings(Recipe, SMOKE).model_dump(mode="json")
    rollout = {"max_new_tokens": 24, "max_context_tokens": 640, "routing_replay": replay}
    recipe = Recipe.model_validate(
        base
        | {
            "initial": {"path": str(start), "is_sparse": True},
            "tokenizer": {"path": str(start / "tokenizer.json")},
            "engine": base["engine"] | engine,
            "stages": {
                "rl": {
                    "kind": "agentic_rl",
                    "tasks": {"files": {}},
                    "loop": LOOP,
                    "rollout": rollout,
                }
            },
        }
    )
    progress = ProgressLine(io.StringIO())
    with open_workspace(recipe, run_dir, resume=False, progress=progress) as workspace:
        asyncio.run(run_recipe(workspace))
    rows = read_metrics(run_dir / "metrics.jsonl")
    key = "mismatch/max_abs_log_ratio"
    return recipe, [row.values[key] for row in rows if key in row.values]


@pytest.mark.filterwarnings("ignore")
def test_a_stage_that_replays_has_no_mismatch_and_its_steps_can_be_taken_again(start, tmp_path):
    recipe, mismatch = ran(start, tmp_path / "run", "experts_and_keys")
    assert mismatch
    assert max(mismatch) <= (0.0 if native() else 1e-4)
    with RunDirectory.look(tmp_path / "run").read_ledger() as ledger:
        batch = ledger.batch("rl", 1)
    segments = [s for group in batch.groups for t in group.trajectories for s in t.segments]
    assert all(len(s.routing) == len(s.token_ids) for s in segments)
    assert any(len(s.token_ids) > 64 for s in segments)  # where keys are left out
    recorded, again = replay_step(recipe, tmp_path / "run", "rl:1")
    assert again.weights_sha256 == recorded.weights_sha256


@pytest.mark.filterwarnings("ignore")
def test_rollouts_in_fp8_are_nearer_to_the_trainer_where_their_routing_is_replayed(start, tmp_path):
    """The first step of both runs is of the same weights and tokens."""
    found = {
        replay: ran(start, tmp_path / replay, replay, weight_quantisation="fp8")[1][0]
        for replay in ("none", "experts_and_keys")
    }
    assert 0 < found["experts_and_keys"] < found["none"]
