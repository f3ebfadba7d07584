"""What goes wrong on a wire: clients that vanish, dawdle, or send what is no request."""

import asyncio
import json
import logging

import httpx
import pytest

from fakes import FakeEngine
from gateway_cases import DONE, LOOK, TOOLS, Door, SlowEngine, chat_body
from longarc.errors import ResourceError
from longarc.gateway.http import HttpSettings
from longarc.gateway.limits import HeadLimits
from longarc.gateway.server import bound_socket, serving
from token_samples import sampled

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
BODIES = {
    "/v1/chat/completions": chat_body(),
    "/v1/responses": {"model": "m", "input": "q"},
    "/v1/messages": chat_body(max_tokens=50),
}


class WaitingEngine(FakeEngine):
    """Stops in the middle of a completion until it is let go, or cancelled."""

    def __post_init__(self):
        super().__post_init__()
        self.has_begun, self.was_cancelled, self.goes_on = (asyncio.Event() for _ in range(3))

    async def stream(self, prompt_ids, sampling, *, session_id):
        stream = super().stream(prompt_ids, sampling, session_id=session_id)
        try:
            async for piece in stream:
                yield piece
                self.has_begun.set()
                await self.goes_on.wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.was_cancelled.set()
            raise
        finally:
            await stream.aclose()


def deep(depth):
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("route", ROUTES)
async def test_a_client_that_goes_in_mid_stream_cancels_its_request_and_nothing_is_recorded(route):
    engine = WaitingEngine([DONE, DONE], piece_tokens=3)
    door = Door(engine)
    async with (
        serving(door.app, bound_socket()) as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": door.key}) as client,
    ):
        async with client.stream("POST", route, json=BODIES[route] | {"stream": True}) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_bytes())
        async with asyncio.timeout(5):
            await engine.was_cancelled.wait()
        assert door.session.segments() == ()
        engine.goes_on.set()
        again = await client.post(route, json=BODIES[route])
        assert again.status_code == 200
    assert len(door.session.segments()) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_a_silent_stream_is_kept_alive_in_the_form_of_its_dialect(route):
    engine = WaitingEngine([DONE], piece_tokens=3)
    door = Door(engine, HttpSettings(ping_s=0.01))
    async with (
        serving(door.app, bound_socket()) as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": door.key}) as client,
        client.stream("POST", route, json=BODIES[route] | {"stream": True}) as answer,
    ):
        seen, pinged = "", {"/v1/messages": '{"type":"ping"}', "/v1/responses": "in_progress"}
        async for text in answer.aiter_text():
            seen += text
            if seen.count(pinged.get(route, ": ping\n")) > 3:
                engine.goes_on.set()
    assert ('"finish_reason":"stop"' in seen) or ("stop_reason" in seen) or ("completed" in seen)
    assert len(door.session.segments()) == 1


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "m", "messages": [{"role": "user", "content": "q',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}], "max_tokens": 5}',
        b'{"model": "m", "input": "\xc3"}',
        b"[]",
        b"null",
        b'"text"',
        b"[" * 100_000,
        deep(5_000).encode(),
        json.dumps({"model": "m", "metadata": 1, "messages": 3, "input": 3}).encode(),
        b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}], "tools": '
        b'[{"name": "t", "type": "function", "input_schema": ' + deep(3_000).encode() + b"}]}",
    ],
)
async def test_what_is_no_request_is_a_400_in_the_form_of_its_dialect(route, body):
    door = Door(FakeEngine([]))
    async with door.raw() as client:
        answer = await client.post(route, content=body)
    assert answer.status_code == 400
    error = answer.json()
    assert error["error"]["type"] == "invalid_request_error"
    assert ("type" in error) is (route == "/v1/messages")
    assert len(error["error"]["message"]) < 1000
    assert door.engine.requests == []


@pytest.mark.parametrize("route", ROUTES)
async def test_unknown_models_and_revoked_keys_are_told_in_the_form_of_the_dialect(route):
    door = Door(FakeEngine([]), HttpSettings(takes_other_models=False, models=("own",)))
    async with door.raw() as client:
        unknown = await client.post(route, json=BODIES[route])
        door.access.revoke(door.key)
        revoked = await client.post(route, json=BODIES[route])
        by_path = await client.post(f"/s/{door.key}{route}", json=BODIES[route])
    assert [r.status_code for r in (unknown, revoked, by_path)] == [404, 401, 404]
    assert all("message" in r.json()["error"] for r in (unknown, revoked, by_path))
    assert "'own'" in unknown.json()["error"]["message"]


async def test_two_parallel_requests_of_a_session_are_two_branches_and_lose_nothing():
    door = Door(SlowEngine([LOOK, DONE, DONE], piece_tokens=1))
    async with door.raw() as client:
        url = "/v1/chat/completions"
        texts = ["one", "two", "three"]
        bodies = [chat_body(messages=[{"role": "user", "content": t}]) for t in texts]
        answers = await asyncio.gather(
            *(client.post(url, json=body | {"stream": i == 1}) for i, body in enumerate(bodies))
        )
    assert [a.status_code for a in answers] == [200] * 3
    segments = door.session.segments()
    assert len(segments) == 3
    assert sum(s.num_trained_tokens for s in segments) == len(LOOK) + 2 * len(DONE)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_full_disk_is_told_nothing_is_recorded_and_the_retry_goes_on(route, streams):
    written = []

    def log(session_id: str, index: int, payload: bytes) -> None:
        if not written:
            written.append(b"")
            raise ResourceError(
                "cannot append to the file: No space left on device; free some space"
            )
        written.append(payload)

    door = Door(FakeEngine([DONE, DONE], piece_tokens=3), turn_log=log)
    async with door.raw() as client:
        failed = await client.post(route, json=BODIES[route] | {"stream": streams})
        assert "No space left" in failed.text
        assert door.session.num_turns == 0
        if not streams:
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        again = await client.post(route, json=BODIES[route] | {"stream": streams})
    assert again.status_code == 200
    assert [len(written), door.session.num_turns] == [2, 1]
    assert door.engine.requests[0] == door.engine.requests[1]


async def test_arguments_that_are_no_json_come_back_as_what_they_are():
    door = Door(FakeEngine([DONE]))
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"cmd": "ls"'},
    }
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "error"},
    ]
    async with door.raw() as client:
        answer = await client.post(
            "/v1/chat/completions", json=chat_body(messages=messages, tools=TOOLS)
        )
    assert answer.status_code == 200


@pytest.mark.slow
async def test_a_body_of_200_mb_is_refused_before_it_is_read():
    door = Door(FakeEngine([]))
    body = b" " * (200 << 20)
    async with (
        serving(door.app, bound_socket()) as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": door.key}, timeout=60) as client,
    ):
        declared = await client.post("/v1/messages", content=body)

        async def chunks():
            for _ in range(200):
                yield b" " * (1 << 20)

        undeclared = await client.post("/v1/messages", content=chunks())
        assert (await client.get("/v1/models")).status_code == 200
    assert [declared.status_code, undeclared.status_code] == [413, 413]
    assert declared.json()["error"]["type"] == "request_too_large"


async def exchange(url, data):
    """Write bytes to a server, and return all that it answers."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", b"408"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ", b"408"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000, b"431"),
        (b"GET /health HTTP/1.1\r\n" + b"x-many: 1\r\n" * 9_000 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 200_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    ],
)
async def test_heads_that_are_slow_long_or_none_are_refused_and_hung_up_on(head, status):
    door = Door(FakeEngine([]))
    limits = HeadLimits(max_bytes=64 << 10, timeout_s=0.2)
    async with serving(door.app, bound_socket(), head_limits=limits) as url:
        answer = await exchange(url, head)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
    first, _, rest = answer.partition(b"\r\n")
    assert first.split()[1] == status
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_a_body_that_does_not_come_is_a_408():
    door = Door(FakeEngine([]), HttpSettings(body_timeout_s=0.1))
    head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {door.key}\r\ncontent-length: 99\r\n\r\n{{"
    async with serving(door.app, bound_socket()) as url:
        answer = await exchange(url, head.encode())
    assert answer.split()[1] == b"408"
    assert b'"type":"error"' in answer


async def test_a_client_that_does_not_read_is_let_go():
    letters = sampled("t</think>" + "abcdefgh" * 30)
    engine = FakeEngine([letters] * 2, piece_tokens=1)
    door = Door(engine, HttpSettings(send_timeout_s=0.05))
    sent = asyncio.Event()

    async def receive():
        if sent.is_set():
            await asyncio.Event().wait()
        sent.set()
        return {"type": "http.request", "body": json.dumps(chat_body(stream=True)).encode()}

    async def send(message):
        await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"x-api-key", door.key.encode())],
    }
    async with asyncio.timeout(5):
        await door.app(scope, receive, send)
    async with door.raw() as client:
        assert (await client.get("/health")).json()["num_requests"] == 0


async def test_neither_keys_nor_what_was_said_reach_the_log(caplog):
    def fail(request: int, piece: int) -> None:
        raise ValueError("the secret phrase of the prompt")

    caplog.set_level(logging.INFO)
    door = Door(FakeEngine([DONE], before_piece=fail))
    async with door.raw() as client:
        body = chat_body(messages=[{"role": "user", "content": "the secret phrase"}])
        for path in (
            "/v1/chat/completions",
            f"/s/{door.key}/v1/chat/completions",
            f"/s/{door.key}/no",
        ):
            await client.post(path, json=body)
    logged = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("longarc"))
    assert "ValueError" in logged
    assert "secret phrase" not in logged
    assert door.key not in logged


async def test_the_description_names_every_route_and_resolves_its_references():
    door = Door(FakeEngine([]))
    async with door.raw() as client:
        described = (await client.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1")
    served = {route.path for route in door.app.routes if "/v1/" in route.path}
    assert {p for p in served if "{model" not in p} == set(described["paths"])
    schemas = described["components"]["schemas"]
    refs = {part.split('"')[0] for part in json.dumps(described).split("#/components/schemas/")[1:]}
    assert refs <= set(schemas)
