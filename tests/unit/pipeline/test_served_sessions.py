"""Sessions that people opened at a chat server: under which ids they are found again."""

import asyncio
import io

import httpx
import pytest

from longarc.config.recipe import Recipe
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.pipeline.local import open_workspace
from longarc.pipeline.progress import ProgressLine
from longarc.pipeline.serve import ServeSettings, serve
from longarc.runs.directory import RunDirectory
from model_cases import small_qwen
from token_samples import small_tokenizer

SETTINGS = ServeSettings(
    stage=None,
    host="127.0.0.1",
    port=0,
    api_key="secret",
    temperature=1.0,
    max_new_tokens=4,
    max_context_tokens=512,
)


@pytest.fixture
def recipe():
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


@pytest.fixture
def run(tmp_path, recipe):
    """Return a run whose only stage is finished."""
    path = tmp_path / "run"
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
    return path


async def test_every_session_is_told_by_the_id_that_shows_it_when_the_server_stops(run, recipe):
    told = []
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    progress = ProgressLine(io.StringIO())
    with open_workspace(recipe, run, resume=True, progress=progress) as workspace:
        ready = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                serve(
                    workspace,
                    SETTINGS,
                    on_ready=lambda base_url, _: ready.set_result(base_url),
                    on_recorded=lambda *recorded: told.append(recorded),
                )
            )
            base_url = await ready
            named = base_url.removesuffix("/v1") + "/s/mine/v1"
            headers = {"Authorization": "Bearer secret"}
            async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
                for url in (base_url, base_url, named):
                    answer = await client.post(f"{url}/chat/completions", json=request)
                    assert answer.status_code == 200, answer.text
            workspace.stop.set()
    with RunDirectory.look(run).read_ledger() as ledger:
        rows = {row.id: row.num_turns for row in ledger.rows(stage="serve")}
    assert dict(told) == rows
    assert rows == {"serve/2bb80d53/default/0": 2, "serve/2bb80d53/mine/0": 1}
