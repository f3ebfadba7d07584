"""Server and client of the engine's own protocol, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fakes import FakeEngine, FakeWorkerEngine, fake_token
from longarc.engine.remote import RemoteEngine
from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.wire import EngineDescription, StreamRequest, dumps
from longarc.errors import (
    ConfigError,
    EngineBusyError,
    EngineError,
    EngineFaultError,
    EngineLostError,
    EngineRequestError,
    LongArcError,
    WeightsRefusedError,
)
from longarc.gateway.server import bound_socket, serving
from longarc.records.sampling import SampledTokens, Sampling, WeightSource

KEY = "key"
DESCRIPTION = EngineDescription(
    model={"family": "fake"},
    attention="dense",
    max_context_tokens=64,
    num_ranks=1,
    records_routing="experts",
)


@asynccontextmanager
async def served(
    *ranks, port=0, description=DESCRIPTION, **settings
) -> AsyncIterator[tuple[EngineDoor, str]]:
    door = EngineDoor(ranks, description, DoorSettings(**{"api_key": KEY, **settings}))
    async with serving(door.app(), bound_socket(port=port), grace_s=1) as address:
        yield door, address


@asynccontextmanager
async def connected(*ranks, rank=0, **settings) -> AsyncIterator[tuple[EngineDoor, RemoteEngine]]:
    async with (
        served(*ranks, **settings) as (door, address),
        RemoteEngine(address, api_key=KEY, rank=rank) as engine,
    ):
        yield door, engine


async def complete(engine, *, num=6, interval=2, seed=1) -> list[SampledTokens]:
    asked = Sampling(max_new_tokens=num, stream_interval_tokens=interval, seed=seed)
    return [piece async for piece in engine.stream([1, 2], asked, session_id="s")]


class RaisingEngine(FakeEngine):
    """Hands over a piece or none, then fails."""

    def __init__(self, error, *, after_pieces=0):
        super().__init__([[1, 2, 3, 4, 5, 6]])
        self.error, self.after_pieces = error, after_pieces

    async def stream(self, prompt_ids, sampling, *, session_id):
        pieces = super().stream(prompt_ids, sampling, session_id=session_id)
        for _ in range(self.after_pieces):
            yield await anext(pieces)
        raise self.error


async def test_what_the_engine_gives_is_what_the_client_gets():
    here, there = FakeWorkerEngine(token_s=0), FakeWorkerEngine(token_s=0)
    async with connected(there) as (_, engine):
        assert await complete(engine) == await complete(here)
        assert there.sessions == ["s"]
        assert await engine.score([1, 2, 3], temperature=0.5) == [0.0, -2.0, -2.0]
        await engine.update_weights(WeightSource(path="w", sha256="0"), policy_version=4)
        ((path, version),) = there.updates
        assert path.endswith("/w")  # the server has another working directory
        assert path.startswith("/")
        assert version == 4
        health = await engine.health()
        assert replace(health, instance_id="first") == await there.health()
        assert await engine.describe() == DESCRIPTION


async def test_a_completion_begun_elsewhere_says_so_to_the_server():
    there = FakeWorkerEngine(token_s=0)
    async with connected(there) as (_, engine):
        begun = [fake_token(1, 0), fake_token(1, 1)]
        asked = Sampling(max_new_tokens=3, seed=1, num_sampled_before=2)
        pieces = [piece async for piece in engine.stream([9, *begun], asked, session_id="s")]
    assert pieces[0].token_ids == tuple(fake_token(1, i) for i in (2, 3, 4))


@pytest.mark.parametrize(
    "kind", [EngineRequestError, EngineBusyError, EngineFaultError, EngineLostError, EngineError]
)
@pytest.mark.parametrize("after_pieces", [0, 1])
async def test_an_error_of_the_engine_is_raised_here_as_the_same_class(kind, after_pieces):
    async with connected(RaisingEngine(kind("the reason"), after_pieces=after_pieces)) as (
        _,
        engine,
    ):
        stream = engine.stream([1], Sampling(max_new_tokens=6), session_id="s")
        for _ in range(after_pieces):
            assert (await anext(stream)).finish_reason is None
        with pytest.raises(kind, match="rank 0: the reason") as caught:
            await anext(stream)
        assert type(caught.value) is kind


async def test_a_foreign_exception_of_an_engine_is_an_engine_error_and_tells_its_name():
    async with connected(RaisingEngine(ZeroDivisionError("oops"))) as (_, engine):
        with pytest.raises(EngineError, match="ZeroDivisionError: oops"):
            await complete(engine)


async def test_an_engine_that_ends_without_a_word_is_lost():
    class Mute(FakeEngine):
        async def stream(self, prompt_ids, sampling, *, session_id):
            return
            yield

    async with connected(Mute([])) as (_, engine):
        with pytest.raises(EngineLostError, match="without a finish reason"):
            await complete(engine)


async def test_refused_weights_are_refused_here():
    there = FakeWorkerEngine(token_s=0, refuses=WeightsRefusedError("half a file"))
    async with connected(there) as (_, engine):
        with pytest.raises(WeightsRefusedError, match="half a file"):
            await engine.update_weights(WeightSource(path="w", sha256="0"), policy_version=4)


async def test_a_client_that_hangs_up_cancels_its_request():
    there = FakeWorkerEngine(token_s=0)
    async with connected(there) as (door, engine):
        there.hang()
        asked = Sampling(max_new_tokens=6, seed=1)
        task = asyncio.ensure_future(anext(engine.stream([1], asked, session_id="s")))
        while not there.num_open:
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(5):
            while there.num_open:
                await asyncio.sleep(0)
        await asyncio.gather(task, return_exceptions=True)
        there.hang(on=False)
        assert door._counters.num_ended == {"disconnected": 1}


async def test_closing_a_stream_half_way_cancels_its_request():
    there = FakeWorkerEngine(token_s=0.001)
    async with connected(there) as (_, engine):
        asked = Sampling(max_new_tokens=10_000, seed=1, stream_interval_tokens=1)
        stream = engine.stream([1], asked, session_id="s")
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(5):
            while there.num_open:
                await asyncio.sleep(0)
    assert there.num_sampled < 10_000


async def test_each_rank_is_an_engine_of_its_own():
    ranks = FakeWorkerEngine(token_s=0), FakeWorkerEngine(token_s=0, policy_version=5)
    async with connected(*ranks, rank=1) as (_, engine):
        pieces = await complete(engine)
    assert {piece.policy_version for piece in pieces} == {5}
    assert (ranks[0].sessions, ranks[1].sessions) == ([], ["s"])
    async with connected(*ranks, rank=2) as (_, engine):
        for asking in (complete(engine), engine.score([1]), engine.health()):
            with pytest.raises(EngineRequestError, match=r"no rank 2: this server has 0 \.\. 1"):
                await asking


async def test_nothing_but_liveness_is_told_without_the_key():
    async with served(FakeWorkerEngine()) as (_, address):
        async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            for method, path in [
                ("GET", "/metrics"),
                ("GET", "/v1/engine"),
                ("GET", "/v1/health"),
                ("POST", "/v1/stream"),
                ("POST", "/v1/score"),
                ("POST", "/v1/update_weights"),
            ]:
                for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
                    reply = await client.request(method, path, headers=headers)
                    assert reply.status_code == 401, path
        async with RemoteEngine(address, api_key="wrong") as engine:
            with pytest.raises(ConfigError, match="LONGARC_ENGINE_KEY"):
                await engine.describe()
            with pytest.raises(ConfigError, match="refuses the key"):
                await complete(engine)
    with pytest.raises(ConfigError, match="may not be empty"):
        EngineDoor([FakeWorkerEngine()], DESCRIPTION, DoorSettings(api_key=""))


@pytest.mark.parametrize(
    ("path", "body", "headers", "message"),
    [
        ("/v1/stream", b"{}", {}, "prompt_ids"),
        ("/v1/stream", b"x" * 200, {}, "longer than 100 bytes"),
        ("/v1/score", b'{"token_ids": [1], "temprature": 1}', {}, "unknown key"),
        ("/v1/nothing", b"", {}, "Not Found"),
        ("/v1/score", b"{}", {"x-longarc-protocol": "2"}, "protocol version '2'"),
    ],
)
async def test_a_bad_request_is_answered_with_a_typed_error(path, body, headers, message):
    async with (
        served(FakeWorkerEngine(), max_body_bytes=100) as (_, address),
        httpx.AsyncClient(base_url=address, trust_env=False) as client,
    ):
        reply = await client.post(
            path, content=body, headers={"authorization": f"Bearer {KEY}", **headers}
        )
    assert 400 <= reply.status_code < 500
    assert reply.json()["error"]["kind"] == "EngineRequestError"
    assert message in reply.json()["error"]["message"]


async def test_too_many_requests_at_once_are_pushed_back():
    there = FakeWorkerEngine(token_s=0)
    async with connected(there, max_open=1) as (_, engine):
        there.hang()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(complete(engine))
            while not there.num_open:
                await asyncio.sleep(0)
            with pytest.raises(EngineBusyError, match="limit of this server"):
                await complete(engine)
            there.hang(on=False)
        assert len(running.result()) == 3


async def test_a_draining_server_ends_what_runs_and_takes_nothing_new():
    there = FakeWorkerEngine(token_s=0.01)
    async with connected(there) as (door, engine):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(complete(engine, num=20))
            while not there.num_open:
                await asyncio.sleep(0)
            draining = tasks.create_task(door.drain(within_s=30))
            await asyncio.sleep(0)
            with pytest.raises(EngineLostError, match="going to stop"):
                await complete(engine)
            assert not (await engine.health()).is_ready
            with pytest.raises(EngineLostError, match="going to stop"):
                await engine.update_weights(WeightSource(path="w", sha256="0"), policy_version=1)
            assert not draining.done()
        assert sum(len(piece.token_ids) for piece in running.result()) == 20


async def test_what_outlasts_the_drain_is_told_to_go_elsewhere():
    there = FakeWorkerEngine(token_s=0.05)
    async with connected(there) as (door, engine):
        asked = Sampling(max_new_tokens=6, seed=1, stream_interval_tokens=2)
        stream = engine.stream([1], asked, session_id="s")
        assert len((await anext(stream)).token_ids) == 2
        there.hang()
        await door.drain(within_s=0.01)
        with pytest.raises(EngineLostError, match=r"had drained for 0\.01 s"):
            await anext(stream)
        there.hang(on=False)
        assert there.num_open == 0


async def test_liveness_follows_the_engine_and_the_drain():
    there = FakeWorkerEngine(token_s=0)
    async with (
        served(there) as (door, address),
        httpx.AsyncClient(base_url=address, trust_env=False) as client,
    ):
        there.is_ready = False
        assert (await client.get("/health")).json() == {"status": "not_ready"}
        there.is_ready = True
        await door.drain(within_s=0)
        reply = await client.get("/health")
    assert (reply.status_code, reply.json()) == (503, {"status": "draining"})


async def test_metrics_are_in_the_format_of_prometheus():
    there = FakeWorkerEngine(token_s=0)
    async with connected(there, FakeWorkerEngine(token_s=0, policy_version=2)) as (_, engine):
        await complete(engine)
        async with httpx.AsyncClient(trust_env=False) as client:
            page = await client.get(
                f"{engine.address}/metrics", headers={"authorization": f"Bearer {KEY}"}
            )
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = page.text.splitlines()
    assert "# TYPE longarc_engine_sampled_tokens_total counter" in lines
    assert 'longarc_engine_sampled_tokens_total{rank="0"} 6.0' in lines
    assert 'longarc_engine_policy_version_steps{rank="1"} 2.0' in lines
    assert "# TYPE longarc_engine_preemptions_total counter" in lines
    assert 'longarc_engine_prefill_tokens_saved_frac{rank="0"} 0.0' in lines
    assert 'longarc_server_streams_total{end="length"} 1.0' in lines
    samples = [line for line in lines if not line.startswith("#")]
    assert all(len(line.split()) == 2 and float(line.split()[1]) >= 0 for line in samples)


async def test_a_server_that_is_not_there_is_lost():
    with bound_socket() as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with RemoteEngine(address, api_key=KEY) as engine:
        for asking in (complete(engine), engine.health(), engine.score([1])):
            with pytest.raises(EngineLostError, match="cannot be reached"):
                await asking


async def test_a_server_that_was_started_anew_is_not_taken_for_the_old_one():
    there = FakeWorkerEngine(token_s=0)
    async with connected(there) as (_, engine):
        await engine.health()
        await complete(engine)
        port = int(engine.address.rpartition(":")[2])
    async with served(there, port=port), RemoteEngine(engine.address, api_key=KEY) as other:
        other._instance_id = engine._instance_id
        with pytest.raises(EngineLostError, match="started anew"):
            await complete(other)
        with pytest.raises(EngineLostError, match="started anew"):
            await other.score([1])
        await other.health()
        await complete(other)


@asynccontextmanager
async def answering(body: bytes, *, status: int = 200) -> AsyncIterator[str]:
    """Serve one answer to whatever is asked; yields the address."""

    async def answer(request: Request) -> Response:
        return Response(body, status_code=status)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    async with serving(app, bound_socket()) as address:
        yield address


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "sparse"}, "attention='sparse' now, it had 'dense'"),
        ({"weight_quantisation": "fp8"}, "weight_quantisation='fp8' now, it had 'none'"),
        ({"cache_quantisation": "fp8"}, "cache_quantisation='fp8' now, it had 'none'"),
        ({"model": {"family": "other"}}, "another model: family is 'other' now, it was 'fake'"),
        ({"max_context_tokens": 63}, "max_context_tokens=63 now, it had 64"),
        ({"records_routing": "none"}, "records_routing='none' now, 'experts' is asked of it"),
    ],
)
async def test_a_server_that_serves_something_else_after_a_restart_is_lost_until_it_does_not(
    change, message
):
    there = FakeWorkerEngine(token_s=0)
    async with served(there) as (_, address):
        port = int(address.rpartition(":")[2])
        engine = RemoteEngine(address, api_key=KEY)
        engine.expect(DESCRIPTION)
        await engine.health()
    async with engine:
        async with served(there, port=port, description=replace(DESCRIPTION, **change)):
            for asking in (engine.health(), complete(engine), engine.health()):
                with pytest.raises(EngineLostError, match="started anew") as raised:
                    await asking
            assert message in str(raised.value)
        async with served(there, port=port):
            await engine.health()
            await complete(engine)


async def test_a_server_that_can_do_more_after_a_restart_is_used_again():
    there = FakeWorkerEngine(token_s=0)
    before = replace(DESCRIPTION, records_routing="none")
    more = replace(DESCRIPTION, max_context_tokens=65)
    async with (
        served(there, description=more) as (_, address),
        RemoteEngine(address, api_key=KEY) as engine,
    ):
        engine.expect(before)
        await engine.health()
        await complete(engine)


async def test_a_client_that_does_not_read_keeps_no_server_from_stopping(monkeypatch):
    monkeypatch.setattr("longarc.engine.server._LAST_WORDS_S", 0.01)
    door = EngineDoor([FakeWorkerEngine(token_s=0)], DESCRIPTION, DoorSettings(api_key=KEY))
    body = dumps(
        StreamRequest(prompt_ids=(1,), sampling=Sampling(max_new_tokens=1), session_id="s")
    )
    events: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    events.put_nowait({"type": "http.request", "body": body})
    is_full = asyncio.Event()

    async def send(message):
        is_full.set()
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/stream",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {KEY}".encode())],
    }
    answering = asyncio.create_task(door.app()(scope, events.get, send))
    await is_full.wait()
    async with asyncio.timeout(5):
        await door.drain(within_s=0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering


async def test_a_body_that_never_comes_whole_is_answered_when_the_server_stops():
    async with served(FakeWorkerEngine(token_s=0)) as (door, address):
        reader, writer = await asyncio.open_connection(*address.removeprefix("http://").split(":"))
        head = f"POST /v1/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
        await asyncio.sleep(0.05)  # until it waits for the rest
        await door.drain(within_s=0)
        async with asyncio.timeout(5):
            answer = await reader.readuntil(b"}}")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"EngineLostError" in answer


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b'{"surprise": 1}\n', "answers in an unknown way"),
        (200, b"", "ended before the completion"),
        (502, b"<html>bad gateway</html>", "is it an engine server"),
    ],
)
async def test_an_answer_of_something_else_is_a_lost_engine(status, body, message):
    async with (
        answering(body, status=status) as address,
        RemoteEngine(address, api_key=KEY) as engine,
    ):
        with pytest.raises(EngineLostError, match=message):
            await complete(engine)


async def test_lines_are_split_at_newlines_alone():
    text = '{"error":{"kind":"EngineFaultError","message":"a\u2028b\x85c"}}\n'
    async with answering(text.encode()) as address, RemoteEngine(address, api_key=KEY) as engine:
        with pytest.raises(EngineFaultError, match="a\u2028b\x85c"):
            await complete(engine)


@asynccontextmanager
async def sending(data: bytes, *, size: int) -> AsyncIterator[str]:
    """Answer whatever is asked with some bytes, ``size`` at a time; yields the address."""

    async def answer(request: Request) -> Response:
        async def chunks():
            for start in range(0, len(data), size):
                yield data[start : start + size]
                await asyncio.sleep(0)

        return StreamingResponse(chunks())

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    async with serving(app, bound_socket()) as address:
        yield address


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_lines_are_whole_however_they_arrive_and_have_a_limit(monkeypatch, size):
    blobs = (b"\xff" * 90, b"")
    pieces = [
        SampledTokens(token_ids=(i,), logprobs=(-0.5,), policy_version=0, routing=blobs)
        for i in range(5)
    ]
    pieces[-1] = replace(pieces[-1], finish_reason="length")
    data = b"".join(dumps(piece) + b"\n" for piece in pieces)
    async with (
        sending(data, size=size) as address,
        RemoteEngine(address, api_key=KEY) as engine,
    ):
        assert await complete(engine) == pieces
        monkeypatch.setattr("longarc.engine.line_client.MAX_LINE_BYTES", 100)
        if size < 100:
            with pytest.raises(EngineLostError, match="a line of more than 100 bytes"):
                await complete(engine)


async def test_a_wire_error_is_one_of_ours():
    async with answering(b"{") as address, RemoteEngine(address, api_key=KEY) as engine:
        with pytest.raises(LongArcError):
            await engine.health()


@pytest.mark.parametrize("asked", ["x", "-1", "1", "9" * 5000])
async def test_a_rank_that_is_none_is_named_as_it_was_asked_for(asked):
    async with (
        served(FakeWorkerEngine()) as (_, address),
        httpx.AsyncClient(base_url=address, trust_env=False) as client,
    ):
        reply = await client.get(
            "/v1/health", params={"rank": asked}, headers={"authorization": f"Bearer {KEY}"}
        )
    error = reply.json()["error"]
    assert (reply.status_code, error["kind"]) == (400, "EngineRequestError")
    assert asked[:80] in error["message"]
    assert "has 0 .. 0" in error["message"]
