"""A recipe that replaces attention on the way: midtrain converts, and the stages behind it go on with the hybrid."""

import asyncio

import pytest

from longarc.config.loader import validated
from longarc.config.recipe import Recipe
from longarc.models.variants.hybrid import GlmHybrid
from longarc.pipeline.local import Interrupted, open_workspace, run_recipe
from longarc.pipeline.workspace import load_checkpoint
from longarc.runs.checkpoint import file_sha256
from longarc.runs.directory import RunDirectory

MODEL = {
    "family": "glm_moe_dsa",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 2,
}
CORPUS = {"max_bytes": 100_000, "copy_share_frac": 0.5}
TEXT = {"context_tokens": 128, "tokens_per_step": 256, "corpus": CORPUS}
LOOP = {"num_steps": 1, "groups_per_step": 1, "group_size": 2, "dynamic_sampling": False}
PATTERN = {"layers": "SGD", "window": 32, "chunk_tokens": 16}
RECIPE = {
    "name": "hybrid",
    "threads": 1,
    "sinks": [],
    "model": MODEL,
    "tokenizer": {"vocab_size": 512, "training_bytes": 50_000},
    "engine": {"cache_tokens": 8192, "max_running": 8},
    "tasks": {"format": {"path": "longarc.envs.tasks.format:Format"}},
    "stages": {
        "pretrain": {"kind": "pretrain", "num_steps": 1, **TEXT},
        "midtrain": {
            "kind": "midtrain",
            "num_steps": 2,
            "rope_theta": 50_000.0,
            "pattern": PATTERN,
            **TEXT,
        },
        "mtp": {"kind": "mtp", "num_steps": 1, **TEXT},
        "rl": {
            "kind": "general_rl",
            "tasks": {"format": {}},
            "loop": {**LOOP, "max_concurrent_rollouts": 4},
            "loss": {
                "path": "longarc.algos.losses:icepop",
                "settings": {"low": 0.5, "high": 2.0, "eps_low": 0.2, "eps_high": 0.28},
            },
            "rollout": {"max_new_tokens": 8, "max_context_tokens": 512},
        },
    },
}


class StopAfter:
    """Stands for the progress line, and asks to stop after a step."""

    def __init__(self, stage: str = "", step: int = 0) -> None:
        self.moment, self.workspace = (stage, step), None

    def update(self, *, stage, step, num_steps, metrics):
        if (stage, step) == self.moment:
            self.workspace.stop.set()

    def __getattr__(self, name):
        return lambda *_, **__: None


def run(directory, *, stop=None, resume=False):
    progress = stop or StopAfter()
    recipe = validated(Recipe, RECIPE, source="recipe")
    with open_workspace(recipe, directory, resume=resume, progress=progress) as workspace:
        progress.workspace = workspace
        asyncio.run(run_recipe(workspace))


def final(directory, stage):
    return RunDirectory.look(directory).stage(stage).final()


@pytest.mark.slow
def test_a_hybrid_is_trained_sampled_from_and_resumed_like_any_model(tmp_path):
    run(tmp_path / "whole")
    hybrid = load_checkpoint(final(tmp_path / "whole", "rl"))
    assert isinstance(hybrid.model, GlmHybrid)
    assert hybrid.model.config.pattern.layers == "SGD"
    assert hybrid.model.config.rope_theta == 50_000.0
    assert hybrid.attention == "dense"
    assert hybrid.model.mtp is not None
    assert hybrid.manifest.policy_version == 5

    with pytest.raises(Interrupted):
        run(tmp_path / "cut", stop=StopAfter("midtrain", 1))
    run(tmp_path / "cut", resume=True)
    digests = [
        file_sha256(final(tmp_path / name, "midtrain") / "model.safetensors")
        for name in ("whole", "cut")
    ]
    assert digests[0] == digests[1]
