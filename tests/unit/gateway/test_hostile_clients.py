"""A program in a box has its session's key and wants more than it is given, or something else than it was told."""

import asyncio
import json

import httpx
import pytest

from fakes import FakeEngine
from gateway_cases import DONE, FORMAT, LOOK, SAMPLING, Door, SlowEngine, chat_body
from longarc.gateway.access import RolloutAccess
from longarc.gateway.budget import SessionBudget
from longarc.gateway.core import Gateway
from longarc.gateway.http import HttpSettings, build_app
from longarc.gateway.limits import HeadLimits
from longarc.gateway.server import bound_socket, serving
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.sampling import Sampling
from token_samples import sampled, tool, user

CHAT = "/v1/chat/completions"
LONG = sampled("a long chain of thought that nobody is to record" * 4 + "</think>x<|user|>")
TOOL = ToolSpec(
    name="bash",
    description="",
    parameters={"type": "object", "properties": {"command": {"type": "object"}}},
)


def client_of(gateway, *names, settings=None, **options):
    """A client of a gateway, and the keys of sessions of these names."""
    access = RolloutAccess()
    keys = [
        access.admit(
            gateway.open(name, sampling=SAMPLING, thinking=True, max_context_tokens=4096, **options)
        )
        for name in names
    ]
    return build_app(gateway, access, settings), keys


def shown(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "budget", [SessionBudget(max_sampled_tokens=60), SessionBudget(max_requests=3)]
)
async def test_what_was_told_of_an_answer_counts_though_the_client_hung_up(budget):
    engine = SlowEngine([LONG] * 50)
    app, (key,) = client_of(Gateway(engine, FORMAT), "s", budget=budget)
    async with serving(app, bound_socket()) as url, httpx.AsyncClient(headers=shown(key)) as client:
        for number in range(50):
            body = chat_body(stream=True, messages=[{"role": "user", "content": f"q{number}"}])
            async with client.stream("POST", f"{url}{CHAT}", json=body) as answer:
                if answer.status_code != 200:
                    break
                num_deltas = 0
                async for line in answer.aiter_lines():
                    num_deltas += "reasoning_content" in line
                    if num_deltas == 15:
                        break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("a session with a budget thinks for nothing, as long as it hangs up")
    assert len(engine.requests) <= 8


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
async def test_a_number_that_no_log_can_hold_is_refused_before_anything_is_sampled(path, name):
    engine = FakeEngine([DONE])
    async with Door(engine, turn_log=lambda *_: None).raw() as client:
        body = chat_body() if path != "/v1/responses" else {"model": "m", "input": "q"}
        answer = await client.post(path, json=body | {name: 10**20, "stream": True})
    assert answer.status_code == 400
    assert name in answer.text
    assert not engine.requests


async def test_one_session_does_not_take_the_room_of_the_others():
    settings = HttpSettings(max_concurrent=64, max_concurrent_per_session=8)
    app, (greedy, other) = client_of(
        Gateway(FakeEngine([DONE]), FORMAT), "a", "b", settings=settings
    )
    async with serving(app, bound_socket()) as url:
        host, port = url.removeprefix("http://").split(":")
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /s/{greedy}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{"
            writer.write(head.encode())
            await writer.drain()
            writers.append(writer)
        await asyncio.sleep(0.2)
        async with httpx.AsyncClient() as client:
            refused = await client.post(f"{url}/s/{greedy}{CHAT}", json=chat_body())
            assert refused.status_code == 429
            assert "8 requests of this session" in refused.text
            assert "retry-after" in refused.headers
            answer = await client.post(f"{url}/s/{other}{CHAT}", json=chat_body())
            assert answer.status_code == 200
            for writer in writers:
                writer.close()
            await asyncio.sleep(0.2)
            body = await client.post(f"{url}/s/{greedy}{CHAT}", content=b"{")
            assert body.status_code == 400  # there is room again


async def test_connections_over_the_bound_are_closed_and_leave_room_when_they_end():
    limits = HeadLimits(max_connections=4)
    app, (key,) = client_of(Gateway(FakeEngine([DONE]), FORMAT), "a")
    async with serving(app, bound_socket(), head_limits=limits) as url:
        host, port = url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        await asyncio.sleep(0.1)
        reader, extra = await asyncio.open_connection(host, int(port))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(reader.readexactly(1), 5)
        extra.close()
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient(headers=shown(key)) as client:
            assert (await client.post(f"{url}{CHAT}", json=chat_body())).status_code == 200


@pytest.mark.parametrize("depth", [90, 120, 490, 900])
async def test_a_call_that_is_nested_deeply_is_a_bad_call_and_the_turn_counts(depth):
    value = "[" * depth + "]" * depth
    call = f"t</think><tool_call>bash<arg_key>command</arg_key><arg_value>{value}</arg_value></tool_call><|observation|>"
    session = Gateway(FakeEngine([sampled(call), DONE]), FORMAT, turn_log=lambda *_: None).open(
        "s", sampling=Sampling(max_new_tokens=4000), thinking=True, max_context_tokens=9000
    )
    said = [user("q")]
    answer = (await session.chat(said, tools=[TOOL])).message
    (made,) = answer.tool_calls
    assert (made.error is None) == (depth < 100)
    await session.chat([*said, answer, tool("r")], tools=[TOOL])
    assert session.num_turns == 2
    assert len(session.segments()) == 1


@pytest.mark.parametrize("depth", [120, 900])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_history_with_a_call_nested_deeply_is_read_as_a_bad_call(path, depth):
    value = '{"a":' + "[" * depth + "]" * depth + "}"
    if path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": value}}
        told = {"role": "assistant", "content": "", "tool_calls": [call]}
        body = json.dumps(chat_body(messages=[{"role": "user", "content": "q"}, told]))
    else:
        told = '{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":%s}]}'
        body = '{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"q"},%s]}' % (
            told % value
        )
    async with Door(FakeEngine([DONE])).raw() as client:
        answer = await client.post(path, content=body)
    assert answer.status_code in (200, 400), answer.text


async def test_a_key_that_another_request_has_which_runs_is_refused():
    engine = SlowEngine([DONE, LOOK])
    async with Door(engine).raw() as client:
        other = chat_body(messages=[{"role": "user", "content": "something else"}])
        answers = await asyncio.gather(
            *(
                client.post(CHAT, headers={"idempotency-key": "k"}, json=body)
                for body in (chat_body(), other)
            )
        )
    assert [answer.status_code for answer in answers] == [200, 400]
    assert "belongs to another request" in answers[1].text
    assert len(engine.requests) == 1


async def test_two_agents_that_ask_the_same_at_once_get_answers_of_their_own():
    engine = SlowEngine([DONE, LOOK])
    gateway = Gateway(engine, FORMAT, repeat_window_s=60)
    app, (key,) = client_of(gateway, "s")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers=shown(key)
    ) as client:
        agents = [
            {"x-claude-code-agent-id": name, "x-claude-code-parent-agent-id": "main"}
            for name in "AB"
        ]
        await asyncio.gather(*(client.post(CHAT, headers=a, json=chat_body()) for a in agents))
    session = gateway.find("s")
    assert len(engine.requests) == session.num_turns == 2
    assert {segment.agent_id for segment in session.segments()} == {"A", "B"}


def test_arguments_that_are_merely_equal_are_another_history():
    def keys(session, value):
        call = ToolCall(id="c", name="f", arguments={"x": value})
        said = [
            user("q"),
            Message(role=Role.ASSISTANT, content="", tool_calls=(call,)),
            tool("r"),
        ]
        return session._chain.keys(said, (), thinking=False)

    gateway = Gateway(FakeEngine([DONE]), FORMAT)
    warm, cold = (
        gateway.open(name, sampling=SAMPLING, thinking=False, max_context_tokens=4096)
        for name in ("warm", "cold")
    )
    as_true = keys(warm, True)
    assert keys(warm, 1) == keys(cold, 1) != as_true
    assert keys(warm, True) == as_true


async def test_what_refused_requests_leave_in_memory_counts_and_rests():
    gateway = Gateway(FakeEngine([DONE]), FORMAT, max_warm_bytes=1 << 20)
    names = [f"s{number}" for number in range(4)]
    app, keys = client_of(gateway, *names)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for key in keys:
            body = chat_body(messages=[{"role": "user", "content": "x " * 300_000}])
            answer = await client.post(CHAT, headers=shown(key), json=body)
            assert answer.status_code == 400
    assert sum(gateway.find(name).num_bytes for name in names) <= (1 << 20) + 700_000
