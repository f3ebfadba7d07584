"""Runs whose training is over, without training."""

from pathlib import Path

from longarc.config.recipe import Recipe
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.runs.directory import RunDirectory
from model_cases import small_qwen
from token_samples import small_tokenizer


def small_recipe() -> Recipe:
    """A recipe of one stage with a small model, an engine with little memory and 512 tokens of context."""
    return Recipe.model_validate(
        {
            "name": "r",
            "threads": 1,
            "sinks": [],
            "model": small_qwen(vocab_size=320, max_position_embeddings=512).model_dump(),
            "tokenizer": {"vocab_size": 320},
            "engine": {"cache_tokens": 2048, "max_running": 2},
            "stages": {"pretrain": {"kind": "pretrain", "num_steps": 1}},
        }
    )


def write_finished_run(path: Path, recipe: Recipe) -> None:
    """Write a run of which the stage ``pretrain`` is finished."""
    tokenizer = small_tokenizer()
    with RunDirectory.create(path, recipe=recipe.model_dump(mode="json"), seeds={"run": 0}) as run:
        tokenizer.save(path / "tokenizer.json")
        model = build_model(recipe.model, seed=0)
        stage = run.stage("pretrain")
        stage.set_final(
            stage.writer(keep_last=1).write(
                lambda directory: save_weights(model, directory / "model.safetensors"),
                kind="policy",
                stage="pretrain",
                step=1,
                policy_version=0,
                model=recipe.model.model_dump(mode="json"),
                tokenizer_sha256=tokenizer.digest,
                info={"attention": "dense"},
            )
        )
