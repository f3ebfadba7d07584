"""The door of whoever runs the rollouts: keys, segments, weights, metrics."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson
import pytest

from atif_rules import broken_rules
from fakes import FakeEngine
from longarc.errors import ConfigError, EngineError, WeightsRefusedError
from longarc.gateway.admin import AdminDoor
from longarc.gateway.core import Gateway
from longarc.gateway.durable import DurableSessions, SessionSpec
from longarc.gateway.http import build_app
from longarc.gateway.meter import Meter
from longarc.gateway.turn_files import TurnFiles
from longarc.records.sampling import Sampling
from longarc.runs.atif_import import trajectories_from_atif
from longarc.runs.record_json import trajectory_from_json
from longarc.tokens.glm import GlmFormat
from token_samples import sampled, small_tokenizer

FORMAT = GlmFormat(small_tokenizer())
SPEC = SessionSpec(
    sampling=Sampling(max_new_tokens=300, temperature=0.7), thinking=True, max_context_tokens=4096
)
DONE = sampled("seen</think>the word<|user|>")
ADMIN = {"authorization": "Bearer admin"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


@asynccontextmanager
async def door(engine: FakeEngine, directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    files = TurnFiles(directory)
    gateway = Gateway(engine, FORMAT, turn_log=files.append)
    sessions = DurableSessions(files, gateway)
    app = build_app(gateway, sessions)
    ticks = iter(range(1000))
    meter = Meter(app, clock=lambda: next(ticks) / 1000)
    app.router.routes.extend(AdminDoor(gateway, sessions, SPEC, meter, admin_key="admin").routes())
    transport = httpx.ASGITransport(meter)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
    files.close()


async def minted(client: httpx.AsyncClient, **asked: object) -> dict[str, str]:
    reply = await client.post("/admin/sessions", headers=ADMIN, json=asked)
    assert reply.status_code == 201, reply.text
    return reply.json()


async def test_a_minted_key_opens_a_session_whose_segments_are_lines_of_json(tmp_path):
    engine = FakeEngine([DONE])
    async with door(engine, tmp_path) as client:
        session = await minted(client, session_id="run-1", temperature=0.25, seed=4)
        assert session["base_url"] == f"http://gateway/s/{session['key']}/v1"
        reply = await client.post(f"{session['base_url']}/chat/completions", json=CHAT)
        assert reply.json()["choices"][0]["message"]["content"] == "the word"
        lines = await client.get("/admin/sessions/run-1/segments", headers=ADMIN)
        listed = await client.get("/admin/sessions", headers=ADMIN)
    assert engine.requests[0].sampling.temperature == 0.25
    assert lines.headers["content-type"].startswith("application/x-ndjson")
    (segment,) = [orjson.loads(line) for line in lines.text.splitlines()]
    sampled_ids = [
        i for i, was in zip(segment["token_ids"], segment["is_sampled"], strict=True) if was
    ]
    assert sampled_ids == DONE
    assert segment["train_mask"].count(True) == len(DONE)
    assert listed.json() == {"sessions": [{"session_id": "run-1", "is_open": True, "num_turns": 1}]}


async def test_all_of_a_session_is_one_trajectory_also_when_its_key_is_revoked(tmp_path):
    async with door(FakeEngine([DONE]), tmp_path) as client:
        session = await minted(client, session_id="run-1")
        await client.post(f"{session['base_url']}/chat/completions", json=CHAT)
        url = "/admin/sessions/run-1/trajectory"
        own = await client.get(url, headers=ADMIN)
        await client.delete("/admin/sessions/run-1", headers=ADMIN)
        document = await client.get(f"{url}?format=atif", headers=ADMIN)
        refused = await client.get(f"{url}?format=yaml", headers=ADMIN)
        unknown = await client.get("/admin/sessions/run-2/trajectory", headers=ADMIN)
        no_key = await client.get(url)
    trajectory = trajectory_from_json(own.json())
    assert (trajectory.id, trajectory.stage, trajectory.num_turns) == ("run-1", "gateway", 1)
    assert trajectory.turns[0].answer.content == "the word"
    assert trajectory.segments[0].num_trained_tokens == len(DONE)
    assert trajectories_from_atif(document.json(), name="x") == (trajectory,)
    assert document.json()["steps"][-1]["metrics"]["completion_token_ids"] == DONE
    assert broken_rules(document.json()) == []
    assert (refused.status_code, unknown.status_code, no_key.status_code) == (400, 404, 401)
    assert "jsonl or atif" in refused.text


async def test_a_revoked_key_is_refused_and_its_turns_go_when_they_are_told_to(tmp_path):
    async with door(FakeEngine([DONE]), tmp_path) as client:
        session = await minted(client)
        url = f"/admin/sessions/{session['session_id']}"
        assert (await client.delete(url, headers=ADMIN)).json()["is_open"] is False
        refused = await client.post(f"{session['base_url']}/chat/completions", json=CHAT)
        assert refused.status_code == 404
        assert (await client.get(f"{url}/segments", headers=ADMIN)).text == ""
        assert (await client.delete(f"{url}?turns=maybe", headers=ADMIN)).status_code == 400
        await client.delete(f"{url}?turns=delete", headers=ADMIN)
        assert (await client.get(f"{url}/segments", headers=ADMIN)).status_code == 404
        assert (await client.delete(url, headers=ADMIN)).status_code == 404
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (b"{", "JSON"),
        (b'{"temprature": 1}', "temprature"),
        (b'{"temperature": -1}', "temperature=-1"),
        (b'{"max_context_tokens": 5000}', "ask for 4096 or less"),
        (b'{"session_id": "a/b"}', "letters, digits"),
        (b'{"seed": -1}', "seed"),
        (b'{"max_requests": 0}', "max_requests"),
        (b'{"max_context_tokens": 3}', "leaves no room"),
    ],
)
async def test_what_cannot_be_minted_is_said_with_the_field(tmp_path, asked, message):
    async with door(FakeEngine([]), tmp_path) as client:
        reply = await client.post("/admin/sessions", headers=ADMIN, content=asked)
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]
        long = await client.post("/admin/sessions", headers=ADMIN, content=b" " * 70_000)
        assert long.status_code == 413


@pytest.mark.parametrize("key", [None, "wrong", "admi", "admin2"])
async def test_nothing_is_told_without_the_admin_key_not_even_to_a_session(tmp_path, key):
    async with door(FakeEngine([]), tmp_path) as client:
        session = await minted(client)
        for shown in (key, session["key"]):
            headers = {} if shown is None else {"authorization": f"Bearer {shown}"}
            for method, path in (
                ("POST", "/admin/sessions"),
                ("GET", "/admin/sessions"),
                ("GET", f"/admin/sessions/{session['session_id']}/segments"),
                ("DELETE", f"/admin/sessions/{session['session_id']}"),
                ("POST", "/admin/weights"),
            ):
                reply = await client.request(method, path, headers=headers)
                assert reply.status_code == 401
        (state,) = (await client.get("/admin/sessions", headers=ADMIN)).json()["sessions"]
        assert state["is_open"] is True


async def test_an_empty_admin_key_is_refused(tmp_path):
    files = TurnFiles(tmp_path)
    gateway = Gateway(FakeEngine([]), FORMAT)
    sessions = DurableSessions(files, gateway)
    with pytest.raises(ConfigError, match="may not be empty"):
        AdminDoor(gateway, sessions, SPEC, Meter(build_app(gateway, sessions)), admin_key="")
    files.close()


class UpdatableEngine(FakeEngine):
    """Takes weights, or says why not."""

    error: EngineError | None = None
    taken: tuple[str, int] | None = None

    async def update_weights(self, source, *, policy_version):
        if self.error is not None:
            raise self.error
        self.taken = (source.path, policy_version)


async def test_weights_go_to_the_engine_and_a_refusal_comes_back(tmp_path):
    engine = UpdatableEngine([])
    body = {"path": "/w/model.safetensors", "sha256": "0" * 64, "policy_version": 7}
    async with door(engine, tmp_path) as client:
        reply = await client.post("/admin/weights", headers=ADMIN, json=body)
        assert (reply.status_code, reply.json()) == (200, {"policy_version": 7})
        assert engine.taken == ("/w/model.safetensors", 7)
        for error, status in ((WeightsRefusedError("other shape"), 409), (EngineError("x"), 503)):
            engine.error = error
            reply = await client.post("/admin/weights", headers=ADMIN, json=body)
            assert reply.status_code == status
        short = await client.post("/admin/weights", headers=ADMIN, json=body | {"sha256": "0"})
        assert short.status_code == 400


async def test_metrics_count_by_route_and_status_and_name_no_key(tmp_path):
    async with door(FakeEngine([DONE]), tmp_path) as client:
        session = await minted(client)
        await client.post(f"{session['base_url']}/chat/completions", json=CHAT)
        await client.post("/s/guessed-key/v1/chat/completions", json=CHAT)
        await client.get(
            "/v1/models/some-name", headers={"authorization": f"Bearer {session['key']}"}
        )
        page = (await client.get("/metrics")).text
    assert 'longarc_gateway_requests_total{route="chat/completions",status="200"} 1' in page
    assert 'longarc_gateway_requests_total{route="chat/completions",status="404"} 1' in page
    assert 'longarc_gateway_request_seconds_count{route="chat/completions"} 2' in page
    assert "longarc_gateway_open_sessions 1" in page
    assert "longarc_gateway_engine_ready 1" in page
    for secret in (session["key"], "guessed-key", "some-name", session["session_id"]):
        assert secret not in page
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    samples = [line for line in page.splitlines() if line and not line.startswith("#")]
    for sample in samples:
        found = re.fullmatch(r"([a-z_]+)(\{[^}]*\})? ([0-9.e+-]+)", sample)
        assert found is not None, sample
        assert re.sub(r"_(bucket|sum|count)$", "", found[1]) in names | {found[1]} & names


async def test_a_session_that_could_not_be_written_down_leaves_its_name_free(tmp_path, monkeypatch):
    async with door(FakeEngine([DONE]), tmp_path) as client:
        huge = b'{"session_id":"a","top_k":%d}' % 10**30
        refused = await client.post("/admin/sessions", headers=ADMIN, content=huge)
        assert refused.status_code == 400
        assert "top_k" in refused.text
        with monkeypatch.context() as patched:
            patched.setattr(TurnFiles, "create", lambda *_: 1 / 0)
            failed = await client.post("/admin/sessions", headers=ADMIN, json={"session_id": "a"})
            assert failed.status_code == 500
        session = await minted(client, session_id="a")
        reply = await client.post(f"{session['base_url']}/chat/completions", json=CHAT)
        assert reply.status_code == 200
