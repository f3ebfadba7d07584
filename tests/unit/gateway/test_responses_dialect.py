"""OpenAI Responses: the unmodified openai SDK against a real server, and what Codex sends."""

import json

import openai
import pytest

from fakes import FakeEngine
from gateway_cases import DONE, LOOK, Door, SlowEngine
from longarc.errors import EngineError
from token_samples import sampled, text_of

TOOLS = [
    {
        "type": "function",
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        "strict": False,
    }
]


def call_of(name, **arguments):
    written = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    )
    return sampled(f"x</think><tool_call>{name}{written}</tool_call><|observation|>")


async def streamed(client, **asked):
    stream = await client.responses.create(model="m", stream=True, **asked)
    return [event async for event in stream]


@pytest.mark.parametrize("streams", [False, True])
async def test_the_openai_sdk_calls_a_tool_and_its_items_continue_the_segment(streams):
    door = Door(FakeEngine([LOOK, DONE], piece_tokens=1))
    async with door.sdk() as client:
        items: list = [{"role": "user", "content": "find it"}]
        asked = {"tools": TOOLS, "instructions": "be brief", "store": False}
        if streams:
            first = (await streamed(client, input=items, **asked))[-1].response
        else:
            first = await client.responses.create(model="m", input=items, **asked)
        assert first.status == "completed"
        reasoning, call = first.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "look")
        assert json.loads(call.arguments) == {"command": "ls 'a b'\n"}
        assert (reasoning.id[:3], call.id[:3], call.call_id[:5]) == ("rs_", "fc_", "call_")
        assert first.usage.output_tokens == len(LOOK)

        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "a.txt"})
        second = await client.responses.create(model="m", input=items, **asked)
    assert second.output_text == "the word"
    (segment,) = door.session.segments()
    assert segment.num_trained_tokens == len(LOOK) + len(DONE)


async def test_a_stream_builds_up_the_response_that_it_ends_with():
    door = Door(FakeEngine([sampled("t</think>a b c<|user|>")], piece_tokens=2))
    async with door.sdk() as client:
        events = await streamed(client, input="q")
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    thought = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    done = [e.item for e in events if e.type == "response.output_item.done"]
    response = events[-1].response
    assert (thought, text) == ("t", "a b c")
    assert [item.model_dump() for item in done] == [item.model_dump() for item in response.output]
    added = [(e.output_index, e.item.id) for e in events if e.type == "response.output_item.added"]
    assert added == [(i, item.id) for i, item in enumerate(response.output)]
    assert response.output_text == "a b c"


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_says_nothing_comes_back_and_its_segment_goes_on(streams):
    nothing = sampled("</think><|user|>")
    door = Door(FakeEngine([nothing, DONE], piece_tokens=1))
    async with door.sdk() as client:
        items: list = [{"role": "user", "content": "q"}]
        if streams:
            events = await streamed(client, input=items, store=False)
            first = events[-1].response
            done = [e.item for e in events if e.type == "response.output_item.done"]
            assert [item.model_dump() for item in done] == [i.model_dump() for i in first.output]
        else:
            first = await client.responses.create(model="m", input=items, store=False)
        (item,) = first.output
        assert (item.type, item.content[0].text) == ("message", "")
        items += [item.model_dump(exclude_none=True), {"role": "user", "content": "well?"}]
        await client.responses.create(model="m", input=items, store=False)
    (segment,) = door.session.segments()
    assert segment.num_trained_tokens == len(nothing) + len(DONE)


async def test_the_sdks_own_stream_helper_reads_it():
    door = Door(FakeEngine([LOOK], piece_tokens=1))
    async with (
        door.sdk() as client,
        client.responses.stream(model="m", input="q", tools=TOOLS) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output[-1].name == "bash"


async def test_what_codex_sends_is_understood_and_called_back_in_its_names():
    spawn = {"type": "function", "name": "spawn_agent", "parameters": {"type": "object"}}
    tools = [
        *TOOLS,
        {"type": "namespace", "name": "multi_agent_v1", "description": "d", "tools": [spawn]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "g"}},
        {"type": "web_search", "external_web_access": True},
    ]
    body = {
        "model": "gpt-x",
        "instructions": "You are Codex.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "id": "m1",
                "content": [{"type": "input_text", "text": "dev"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        ],
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "s",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
    }
    door = Door(
        FakeEngine(
            [
                call_of("multi_agent_v1__spawn_agent", message="hi"),
                call_of("apply_patch", input="*** Begin"),
                DONE,
            ]
        )
    )
    async with door.raw() as client:

        async def ask():
            answer = await client.post("/v1/responses", json=body)
            assert answer.status_code == 200
            last = json.loads(answer.text.strip().split("\n\n")[-1].partition("data: ")[2])
            assert last["type"] == "response.completed"
            return last["response"]["output"]

        reasoning, spawned = await ask()
        assert (spawned["name"], spawned["namespace"]) == ("spawn_agent", "multi_agent_v1")
        # Codex keeps the sealed reasoning and nothing else of it.
        sealed = {"type": "reasoning", "summary": [], "content": None}
        sealed["encrypted_content"] = reasoning["encrypted_content"]
        output = {"type": "function_call_output", "call_id": spawned["call_id"], "output": "ok"}
        body["input"] += [sealed, spawned, output]
        _, patch = await ask()
        assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** Begin")
        output = {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "ok"}
        body["input"] += [patch, output]
        await ask()
    (segment,) = door.session.segments()
    prompt = text_of(segment.token_ids)
    assert "web_search" not in prompt
    assert "<|system|>You are Codex.<|system|>dev<|user|>go" in prompt


async def test_a_request_may_go_on_from_a_stored_answer():
    door = Door(FakeEngine([DONE, DONE, DONE]))
    async with door.sdk() as client:
        first = await client.responses.create(model="m", input="q", instructions="one")
        second = await client.responses.create(
            model="m", input="more", instructions="one", previous_response_id=first.id
        )
        assert len(door.session.segments()) == 1
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.responses.create(model="m", input="x", previous_response_id="resp_no")
        assert unknown.value.code == "previous_response_not_found"
        unstored = await client.responses.create(
            model="m", input="x", store=False, previous_response_id=second.id
        )
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input="x", previous_response_id=unstored.id)


async def test_an_answer_that_is_cut_off_is_incomplete():
    door = Door(FakeEngine([DONE]))
    async with door.sdk() as client:
        events = await streamed(client, input="q", max_output_tokens=4)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


async def test_a_response_that_fails_later_ends_with_its_event():
    def fail(request: int, piece: int) -> None:
        if piece == 2:
            raise EngineError("the engine is lost")

    door = Door(SlowEngine([DONE], before_piece=fail))
    async with door.sdk() as client:
        events = await streamed(client, input="q")
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "engine_error"
    assert door.session.segments() == ()


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"name": 3}]}]}, "tools[0].tools[0]"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "c"}, "conversation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_not_supported_is_a_400_that_names_the_field(more, field):
    door = Door(FakeEngine([]))
    async with door.raw() as client:
        answer = await client.post("/v1/responses", json={"model": "m", "input": "q"} | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
    assert door.engine.requests == []
