"""Anthropic Messages: the unmodified anthropic SDK against a real server, and what Claude Code sends."""

import json

import anthropic
import pytest

from fakes import FakeEngine
from gateway_cases import DONE, LOOK, Door
from longarc.errors import EngineBusyError
from longarc.gateway.http import HttpSettings
from token_samples import sampled, text_of

TOOLS = [
    {
        "name": "bash",
        "description": "Run a command.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
    }
]
ASKED = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "q"}]}


def events_of(text):
    return [
        json.loads(block.partition("data: ")[2])
        for block in text.strip().split("\n\n")
        if "data: " in block
    ]


@pytest.mark.parametrize("streams", [False, True])
async def test_the_anthropic_sdk_calls_a_tool_and_its_echo_continues_the_segment(streams):
    door = Door(FakeEngine([LOOK, DONE], piece_tokens=1))
    async with door.anthropic() as client:
        history: list = [{"role": "user", "content": "find it"}]
        asked = {"model": "m", "max_tokens": 200, "tools": TOOLS, "system": "be brief"}
        if streams:
            async with client.messages.stream(**asked, messages=history) as stream:
                first = await stream.get_final_message()
        else:
            first = await client.messages.create(**asked, messages=history)
        assert first.stop_reason == "tool_use"
        assert first.id.startswith("msg_")
        thinking, call = first.content
        assert (thinking.type, thinking.thinking) == ("thinking", "look")
        assert thinking.signature
        assert (call.name, call.input) == ("bash", {"command": "ls 'a b'\n"})
        assert call.id.startswith("toolu_")
        assert first.usage.input_tokens == len(door.engine.requests[0].prompt_ids)
        assert first.usage.output_tokens == len(LOOK)

        history.append({"role": "assistant", "content": [b.model_dump() for b in first.content]})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.txt"}
        history.append({"role": "user", "content": [result]})
        second = await client.messages.create(**asked, messages=history)
    assert second.stop_reason == "end_turn"
    assert second.content[-1].text == "the word"
    (segment,) = door.session.segments()
    assert segment.num_trained_tokens == len(LOOK) + len(DONE)


async def test_a_stream_has_the_events_of_the_dialect_in_their_order():
    door = Door(FakeEngine([sampled("t</think>a b<|user|>")], piece_tokens=2))
    async with door.raw() as client:
        answer = await client.post("/v1/messages?beta=true", json=ASKED | {"stream": True})
    events = events_of(answer.text)
    kinds = [e["type"] for e in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [d["type"] for d in deltas][1:3] == ["signature_delta", "text_delta"]
    assert "".join(d.get("text", "") for d in deltas) == "a b"
    start = events[0]["message"]
    assert start["usage"]["input_tokens"] == len(door.engine.requests[0].prompt_ids)
    names = [b.partition("\n")[0] for b in answer.text.strip().split("\n\n")]
    assert names == [f"event: {kind}" for kind in kinds]


async def test_thinking_with_its_signature_comes_back_verbatim_however_blocks_are_spelt():
    ids = sampled("  Hello.\n\n why</think>said<|user|>")
    door = Door(FakeEngine([ids, DONE]))
    async with door.anthropic() as client:
        first = await client.messages.create(**ASKED)
        blocks = [b.model_dump() for b in first.content]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        history = [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            # Claude Code splits one answer and merges it again.
            {"role": "assistant", "content": blocks[:1]},
            {"role": "assistant", "content": blocks[1:]},
            {"role": "user", "content": "more"},
        ]
        await client.messages.create(model="m", max_tokens=9, messages=history)
    assert len(door.session.segments()) == 1


async def test_what_claude_code_sends_is_understood():
    door = Door(FakeEngine([DONE]))
    body = {
        "model": "claude-x",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1ec; a=b"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "system", "content": "a reminder"},
        ],
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": '{"device": 1}'},
    }
    headers = {
        "x-api-key": door.key,
        "authorization": "",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219",
    }
    async with door.raw() as client:
        assert (await client.head(f"/s/{door.key}")).status_code == 200
        assert (await client.head("/")).status_code == 200
        assert (await client.head("/s/no")).status_code == 404
        answer = await client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200
    events = events_of(answer.text)
    assert events[-2]["context_management"] == {"applied_edits": []}
    prompt = text_of(door.engine.requests[0].prompt_ids)
    assert "billing" not in prompt
    assert "<|system|>You are an agent.\n\nBe brief.<|user|>hi<|system|>a reminder" in prompt
    assert "web_search" not in prompt


async def test_tokens_are_counted_without_sampling_and_like_the_prompt_itself():
    door = Door(FakeEngine([LOOK, DONE]))
    async with door.anthropic() as client:
        history: list = [{"role": "user", "content": "q"}]
        counted = await client.messages.count_tokens(model="m", messages=history, tools=TOOLS)
        assert door.engine.requests == []
        first = await client.messages.create(
            model="m", max_tokens=99, messages=history, tools=TOOLS
        )
        assert counted.input_tokens == first.usage.input_tokens
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "r"}
        history += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        counted = await client.messages.count_tokens(model="m", messages=history, tools=TOOLS)
        second = await client.messages.create(
            model="m", max_tokens=99, messages=history, tools=TOOLS
        )
    assert counted.input_tokens == second.usage.input_tokens
    assert len(door.session.segments()) == 1


async def test_models_are_listed_in_the_form_of_the_sdk_that_asks():
    door = Door(FakeEngine([]))
    async with door.anthropic() as client:
        page = await client.models.list()
        assert [m.id for m in page.data] == ["longarc"]
        assert (await client.models.retrieve("longarc")).type == "model"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("other")
    assert missing.value.body["error"]["type"] == "not_found_error"


async def test_calls_that_cannot_be_read_have_the_name_of_no_tool_and_come_back_as_themselves():
    bad = sampled("x</think><tool_call>bash<arg_key>command</tool_call><|observation|>")
    door = Door(FakeEngine([bad, DONE]))
    async with door.anthropic() as client:
        history: list = [{"role": "user", "content": "q"}]
        first = await client.messages.create(**ASKED | {"tools": TOOLS})
        call = first.content[-1]
        assert call.name == "malformed_call__bash"
        assert "not closed" in call.input["error"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "no such tool"}
        history += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result | {"is_error": True}]},
        ]
        await client.messages.create(**ASKED | {"tools": TOOLS, "messages": history})
    assert len(door.session.segments()) == 1


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"context_management": {"edits": -1}}, "context_management.edits"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"output_config": {"surprise": 1}}, "surprise"),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_not_supported_is_a_400_in_the_dialects_form(more, field):
    door = Door(FakeEngine([]))
    async with door.raw() as client:
        answer = await client.post("/v1/messages", json=ASKED | more)
    error = answer.json()
    assert answer.status_code == 400
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert field in error["error"]["message"]
    assert door.engine.requests == []


async def test_errors_have_the_types_of_the_dialect():
    def busy(request: int, piece: int) -> None:
        raise EngineBusyError("64 requests wait")

    door = Door(
        FakeEngine([DONE], before_piece=busy), HttpSettings(takes_other_models=False, models=("m",))
    )
    async with door.raw() as client:
        url = "/v1/messages"
        refused = await client.post(url, json=ASKED)
        nobody = await client.post(url, json=ASKED, headers={"authorization": ""})
        unknown = await client.post(url, json=ASKED | {"model": "other"})
        long = ASKED | {"messages": [{"role": "user", "content": "long " * 2000}]}
        full = await client.post(url, json=long)
        method = await client.get(url)
    assert [(r.status_code, r.json()["error"]["type"]) for r in (refused, nobody, unknown, full, method)] == [
        (429, "rate_limit_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (400, "invalid_request_error"),
        (405, "invalid_request_error"),
    ]  # fmt: skip
    assert refused.headers["retry-after"] == "1"
    assert full.json()["error"]["message"].startswith("prompt is too long")


async def test_a_served_model_samples_as_the_client_asks():
    door = Door(FakeEngine([DONE]), HttpSettings(honours_sampling=True))
    asked = {"temperature": 0.5, "top_k": 3, "thinking": {"type": "disabled"}}
    async with door.anthropic() as client:
        await client.messages.create(**ASKED, extra_body=asked)
    got = door.engine.requests[0]
    assert (got.sampling.temperature, got.sampling.top_k) == (0.5, 3)
    assert text_of(got.prompt_ids).endswith("</think>")
