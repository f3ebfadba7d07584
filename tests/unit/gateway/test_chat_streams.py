"""Streamed chat completions, read by the unmodified openai SDK from a real server."""

import json

import pytest

from fakes import FakeEngine
from gateway_cases import DONE, LOOK, TOOLS, Door, SlowEngine, chat_body
from longarc.errors import EngineError
from longarc.gateway.http import HttpSettings
from token_samples import sampled, text_of

ASKED = {"model": "x", "messages": [{"role": "user", "content": "q"}]}
TWO_CALLS = sampled(
    "both</think>I look.<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
    "<tool_call>bash<arg_key>command</arg_key><arg_value>pwd</arg_value></tool_call><|observation|>"
)


class StopEngine(FakeEngine):
    """Ends a completion as an engine does that was given a stop text: with the token that completes it."""

    def stream(self, prompt_ids, sampling, *, session_id):
        stream = super().stream(prompt_ids, sampling, session_id=session_id)

        async def ended():
            text = ""
            async for piece in stream:
                text += text_of(piece.token_ids)
                if any(stop in text for stop in sampling.stop_strings):
                    object.__setattr__(piece, "finish_reason", "stop")
                yield piece

        return ended()


async def streamed(door, **asked):
    async with door.sdk() as client:
        stream = await client.chat.completions.create(**ASKED | asked, stream=True)
        return [chunk async for chunk in stream]


def joined(chunks, field):
    return "".join(getattr(c.choices[0].delta, field, None) or "" for c in chunks if c.choices)


async def test_reasoning_and_text_arrive_in_pieces_that_join_to_the_answer():
    door = Door(
        FakeEngine([sampled("I think hard</think>the word is é🦊<|user|>")], piece_tokens=1)
    )
    chunks = await streamed(door, stream_options={"include_usage": True})
    assert joined(chunks, "reasoning_content") == "I think hard"
    assert joined(chunks, "content") == "the word is é🦊"
    assert sum(bool(getattr(c.choices[0].delta, "content", None)) for c in chunks[:-1]) > 5
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        len(door.engine.requests[0].prompt_ids),
        door.session.segments()[0].num_trained_tokens,
    )
    assert len({c.id for c in chunks}) == 1


async def test_a_streamed_call_is_echoed_into_the_same_segment():
    door = Door(FakeEngine([TWO_CALLS, DONE], piece_tokens=3))
    async with door.sdk() as client:
        history: list = [{"role": "user", "content": "q"}]
        async with client.chat.completions.stream(model="x", messages=history, tools=TOOLS) as live:
            async for _ in live:
                pass
            message = (await live.get_final_completion()).choices[0].message
        assert [json.loads(c.function.arguments) for c in message.tool_calls] == [
            {"command": "ls"},
            {"command": "pwd"},
        ]
        assert message.content == "I look."
        history.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            history.append({"role": "tool", "tool_call_id": call.id, "content": "r"})
        await client.chat.completions.create(model="x", messages=history, tools=TOOLS)
    (segment,) = door.session.segments()
    assert segment.num_trained_tokens == len(TWO_CALLS) + len(DONE)


async def test_calls_that_cannot_be_read_are_streamed_as_text_that_is_no_json():
    bad = sampled("x</think><tool_call>bash<arg_key>command</tool_call><|observation|>")
    chunks = await streamed(Door(FakeEngine([bad])), tools=TOOLS)
    (call,) = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


async def test_several_answers_to_one_request_are_branches_and_stream_side_by_side():
    door = Door(FakeEngine([sampled("a</think>one<|user|>"), sampled("b</think>two<|user|>")]))
    chunks = await streamed(door, n=2, stream_options={"include_usage": True})
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert sorted(texts) == ["one", "two"]
    assert len(door.session.segments()) == 2
    sampled_tokens = sum(s.num_trained_tokens for s in door.session.segments())
    assert chunks[-1].usage.completion_tokens == sampled_tokens


async def test_several_answers_have_seeds_of_their_own():
    door = Door(FakeEngine([DONE, DONE]), HttpSettings(honours_sampling=True))
    async with door.sdk() as client:
        answer = await client.chat.completions.create(**ASKED, n=2, seed=7)
    assert len(answer.choices) == 2
    assert {r.sampling.seed for r in door.engine.requests} == {7, 8}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_text_ends_the_answer_before_it_and_its_tokens_are_kept(streams):
    ids = sampled("t</think>so far\nObservation: never")
    door = Door(StopEngine([ids], piece_tokens=1))
    if streams:
        chunks = await streamed(door, stop=["Observation:", "zzz"])
        text, reason = joined(chunks, "content"), chunks[-1].choices[0].finish_reason
    else:
        async with door.sdk() as client:
            answer = await client.chat.completions.create(**ASKED, stop=["Observation:", "zzz"])
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text.strip(), reason) == ("so far", "stop")
    (segment,) = door.session.segments()
    assert text_of(segment.token_ids).endswith("Observation:")


async def test_log_probabilities_come_with_a_stream():
    door = Door(FakeEngine([DONE]))
    chunks = await streamed(door, logprobs=True)
    told = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.logprob for e in told] == [-(i + 1) / 8 for i in range(len(DONE))]


async def test_a_request_that_fails_at_once_has_a_status_and_one_that_fails_later_an_event():
    def fail_at(piece_index):
        def fail(request: int, piece: int) -> None:
            if piece == piece_index:
                raise EngineError("the engine is lost")

        return fail

    async with Door(FakeEngine([DONE], before_piece=fail_at(0))).raw() as client:
        at_once = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    assert (at_once.status_code, at_once.headers["retry-after"]) == (503, "1")

    door = Door(SlowEngine([DONE], before_piece=fail_at(3)))
    async with door.raw() as client:
        later = await client.post("/v1/chat/completions", json=chat_body(stream=True))
    assert later.status_code == 200
    last = later.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
    assert "[DONE]" not in later.text
    assert door.session.segments() == ()


@pytest.mark.parametrize("name", ["bash", None])
async def test_a_forced_call_is_begun_for_the_model_and_only_what_it_samples_is_trained(name):
    choice = {"type": "function", "function": {"name": "bash"}} if name else "required"
    rest = (
        "" if name else "bash"
    ) + "<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"
    ids = sampled(rest + "<|observation|>")
    door = Door(FakeEngine([ids, DONE], piece_tokens=1))
    async with door.sdk() as client:
        history: list = [{"role": "user", "content": "q"}]
        asked = {"model": "x", "tools": TOOLS}
        stream = await client.chat.completions.create(
            **asked, messages=history, tool_choice=choice, stream=True
        )
        chunks = [chunk async for chunk in stream]
        (call,) = [
            c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls
        ]
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "bash",
            {"command": "ls"},
        )
        begun = text_of(door.engine.requests[0].prompt_ids)
        assert begun.endswith("<think></think><tool_call>" + (name or ""))
        history += [
            {"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]},
            {"role": "tool", "tool_call_id": call.id, "content": "r"},
        ]
        await client.chat.completions.create(**asked, messages=history)
    (segment,) = door.session.segments()
    assert segment.num_trained_tokens == len(ids) + len(DONE)


async def test_without_parallel_calls_an_answer_ends_with_its_first_call():
    door = Door(FakeEngine([LOOK]))
    async with door.sdk() as client:
        await client.chat.completions.create(**ASKED, tools=TOOLS, parallel_tool_calls=False)
    end = sampled("</tool_call>")[0]
    assert end in door.engine.requests[0].sampling.stop_ids


async def test_tool_choice_none_leaves_calls_out_of_a_stream():
    chunks = await streamed(Door(FakeEngine([TWO_CALLS])), tools=TOOLS, tool_choice="none")
    assert not any(c.choices[0].delta.tool_calls for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
