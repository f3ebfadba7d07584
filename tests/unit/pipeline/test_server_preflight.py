"""Servers that a later stage samples from are asked before the first one."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fakes import FakeWorkerEngine
from longarc.cli.main import main
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.wire import EngineDescription
from longarc.errors import ConfigError, EngineLostError
from longarc.gateway.server import bound_socket, serving
from longarc.pipeline.server_preflight import check_servers, servers_to_ask

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke.toml"


def recipe(*overrides):
    return load_settings(Recipe, SMOKE, overrides=list(overrides))


def at(*addresses):
    return recipe(f"engine.servers={list(addresses)}")


@asynccontextmanager
async def server():
    described = EngineDescription(model={}, attention="dense", max_context_tokens=64, num_ranks=1)
    door = EngineDoor([FakeWorkerEngine()], described, DoorSettings(api_key="k"))
    async with serving(door.app(), bound_socket()) as address:
        yield address


def nowhere() -> str:
    """Return an address at which nobody listens."""
    with bound_socket() as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


async def test_every_server_that_does_not_answer_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", "k")
    lost = nowhere(), nowhere()
    async with server() as address:
        await check_servers(at(address))
        with pytest.raises(EngineLostError) as refused:
            await check_servers(at(lost[0], address, lost[1]))
    said = str(refused.value)
    assert all(there in said for there in lost)
    assert address not in said
    for hint in ("engine.servers", "longarc serve --engine-only", "--servers-later"):
        assert hint in said


@pytest.mark.parametrize(("key", "said"), [("", "LONGARC_ENGINE_KEY"), ("wrong", "the key")])
async def test_a_key_that_does_not_fit_is_found_too(monkeypatch, key, said):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", key)
    async with server() as address:
        with pytest.raises(ConfigError, match=said):
            await check_servers(at(address))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_from_elsewhere_is_asked_for_its_health(kind):
    lost = nowhere()
    with pytest.raises(EngineLostError, match=rf"(?s){lost}.*engine\.url.*start it with {kind}"):
        await check_servers(recipe(f"engine={{kind='{kind}',url='{lost}'}}"))
    async with server() as address:
        await check_servers(recipe(f"engine={{kind='{kind}',url='{address}'}}"))


async def test_one_that_takes_a_connection_and_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", "k")
    with bound_socket() as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineLostError, match=f"{address} does not answer within 0.2 s"):
            await check_servers(at(address), timeout_s=0.2)


def test_nobody_is_asked_whom_no_stage_to_come_needs():
    assert servers_to_ask(recipe()) == ()
    assert servers_to_ask(recipe("engine={kind='vllm',python='p'}")) == ()
    ours, theirs = at("http://a:1"), recipe("engine={kind='vllm',url='http://a:1'}")
    assert servers_to_ask(ours) == servers_to_ask(theirs) == ("http://a:1",)
    trained = [name for name, stage in ours.stages.items() if stage.kind != "eval"]
    assert servers_to_ask(ours, finished=trained) == ()
    assert servers_to_ask(theirs, finished=trained) == ("http://a:1",)  # which evaluates there
    pair = recipe("engine={kind='vllm',url='http://a:1',prefill_url='http://p:1'}")
    assert servers_to_ask(pair) == ("http://p:1", "http://a:1")


def test_no_run_begins_without_its_servers_unless_they_come_later(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", "k")
    run_dir, lost = tmp_path / "run", nowhere()
    command = ["run", str(SMOKE), "--run-dir", str(run_dir), "--set", "threads=1"]
    assert main([*command, "--set", f'engine.servers=["{lost}"]']) == 1
    assert f"{lost}" in capsys.readouterr().err
    assert not run_dir.exists()
    assert main([*command, "--servers-later"]) == 2
    assert "--servers-later has no effect" in capsys.readouterr().err
    assert not run_dir.exists()


@pytest.mark.parametrize("option", ["--resume", "--servers-later"])
def test_a_replay_resumes_nothing_and_asks_nobody(option, tmp_path, capsys):
    command = ["run", str(SMOKE), "--run-dir", str(tmp_path), "--replay", "reasoning_rl:0"]
    assert main([*command, option]) == 2
    assert f"{option} has no effect with --replay" in capsys.readouterr().err
