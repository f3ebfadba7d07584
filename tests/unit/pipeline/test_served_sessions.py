"""Chat servers: under which ids sessions are found again, and how a server ends whose engine fails."""

import asyncio
import io
import queue
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from longarc.cli.main import main
from longarc.pipeline.local import open_workspace
from longarc.pipeline.progress import ProgressLine
from longarc.pipeline.serve import ServeSettings, serve
from longarc.runs.directory import RunDirectory
from run_cases import small_recipe, write_finished_run

SETTINGS = ServeSettings(
    stage=None,
    host="127.0.0.1",
    port=0,
    api_key="secret",
    temperature=1.0,
    max_new_tokens=4,
    max_context_tokens=512,
    model_names=("fixed",),
)


@pytest.fixture
def recipe():
    return small_recipe()


@pytest.fixture
def run(tmp_path, recipe):
    """Return a run whose only stage is finished."""
    write_finished_run(tmp_path / "run", recipe)
    return tmp_path / "run"


async def test_every_session_is_told_by_the_id_that_shows_it_when_the_server_stops(run, recipe):
    told = []
    request = {"model": "longarc", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
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
                listed = (await client.get(f"{base_url}/models")).json()["data"]
                assert [model["id"] for model in listed] == ["r/pretrain", "longarc", "fixed"]
                other = await client.post(
                    f"{base_url}/chat/completions", json={**request, "model": "gpt-4o"}
                )
                assert other.status_code == 404
                assert "'r/pretrain' or 'longarc' or 'fixed'" in other.json()["error"]["message"]
                for url in (base_url, base_url, named):
                    answer = await client.post(f"{url}/chat/completions", json=request)
                    assert answer.status_code == 200, answer.text
            workspace.stop.set()
    with RunDirectory.look(run).read_ledger() as ledger:
        rows = {row.id: row.num_turns for row in ledger.rows(stage="serve")}
    assert dict(told) == rows
    assert rows == {"serve/2bb80d53/default/0": 2, "serve/2bb80d53/mine/0": 1}


class _Lines(io.StringIO):
    """What a command prints, for a thread that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> int:
        self.written.put(text)
        return len(text)


def _ask(lines: _Lines) -> list[httpx.Response]:
    """Ask for one token, which needs no decode step, and for several, once the server says where it is."""
    address = lines.written.get(timeout=60).split("base_url=")[1].split()[0]
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=address, headers=headers, trust_env=False, timeout=60) as client:
        return [
            client.post(
                "/chat/completions",
                json={
                    "model": "longarc",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": num_tokens,
                },
            )
            for num_tokens in (1, 4)
        ]


def test_a_chat_server_whose_engine_fails_tells_its_client_and_ends_with_1(
    run, monkeypatch, capsys, caplog
):
    def broken(*_, **__):
        raise OverflowError("too large")

    monkeypatch.setattr("longarc.engine.computing.decode", broken)
    lines = _Lines()
    monkeypatch.setattr(sys, "stdout", lines)
    command = ["serve", str(run), "--port", "0", "--api-key", "secret"]
    command += ["--max-context-tokens", "512"]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(_ask, lines)
        code = main(command)
        answered, refused = asking.result(timeout=60)
    assert code == 1
    assert answered.status_code == 200
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert error["type"] == "server_error"
    assert "OverflowError: too large" in error["message"]
    assert "EngineLostError: the engine failed: OverflowError: too large" in capsys.readouterr().err
    assert "no request can be answered any more: the engine failed: OverflowError" in caplog.text
    with RunDirectory.look(run).read_ledger() as ledger:
        assert [row.num_turns for row in ledger.rows(stage="serve")] == [1]
