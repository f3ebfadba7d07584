"""For every client, however it edits its history: exact prompts, each sampled token trained once."""

import asyncio
import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeEngine
from longarc.gateway.core import Gateway
from longarc.records.message import Message, Role
from longarc.records.sampling import Sampling
from longarc.records.segment import NOT_SAMPLED
from longarc.tokens.glm import GlmFormat
from token_samples import BASH, assistant, sampled, small_tokenizer, text_of, tool, user

FORMAT = GlmFormat(small_tokenizer())
OPTIONS = {
    "sampling": Sampling(max_new_tokens=1000),
    "thinking": True,
    "max_context_tokens": 1 << 20,
}

MARKS = re.compile("§[^§]*§")
COMPLETIONS = st.one_of(
    st.sampled_from(
        [
            "r</think>A<|user|>",
            "r</think><tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>",
            "r</think>A",
            "</think><tool_call>bash<arg_key><|endoftext|>",
        ]
    ).map(sampled),
    st.lists(st.integers(0, small_tokenizer().vocab_size - 1), min_size=1, max_size=12),
)
MOVES = st.sampled_from(
    ["go on", "go on", "go on", "edit", "rewind", "drop reasoning", "start over"]
)


def next_history(move: str, history: list[Message], number: int) -> list[Message]:
    """What a client sends after an answer (the last message of ``history``)."""
    text = f"§{number}§"
    said = tool(text) if history[-1].tool_calls else user(text)
    if move == "edit":
        return [*history[:-1], replace(history[-1], content=history[-1].content + "!"), said]
    if move == "rewind":
        return [*history[:1], assistant("A"), said]
    if move == "drop reasoning":
        return [*(replace(m, reasoning=None) for m in history), said]
    if move == "start over":
        return [user(text)]
    return [*history, said]


@given(st.lists(st.tuples(COMPLETIONS, MOVES), min_size=1, max_size=6))
@settings(deadline=None)
def test_segments_are_what_the_engine_saw_and_train_each_sampled_token_once(turns):
    engine = FakeEngine([ids for ids, _ in turns], version_of_piece=lambda r, p: 10 * r + p)
    session = Gateway(engine, FORMAT).open("s", **OPTIONS)

    asked: list[list[Message]] = []

    async def play() -> None:
        history: list[Message] = [user("§q§")]
        for number, (_, move) in enumerate(turns):
            asked.append(history)
            answer = await session.chat(history, tools=[BASH])
            history = next_history(move, [*history, answer.message], number)

    asyncio.run(play())
    seen = [r.prompt_ids + tuple(ids) for r, (ids, _) in zip(engine.requests, turns, strict=True)]
    segments = session.segments()

    for request, history in zip(engine.requests, asked, strict=True):
        said = [m.content for m in history if m.role is not Role.ASSISTANT]
        assert MARKS.findall(text_of(request.prompt_ids)) == said, "the engine saw another history"
    assert {s.token_ids for s in segments} <= set(seen)
    for ids in seen:
        assert any(s.token_ids[: len(ids)] == ids for s in segments), "a turn is in no segment"
    assert sum(s.num_trained_tokens for s in segments) == sum(len(ids) for ids, _ in turns)
    assert [s.order for s in segments] == list(range(len(segments)))
    assert all(s.parent is None if s.order == 0 else s.parent < s.order for s in segments)
    for segment in segments:
        versions = [
            v for v, t in zip(segment.policy_versions, segment.is_sampled, strict=True) if t
        ]
        assert NOT_SAMPLED not in versions
        assert versions == sorted(versions)

    restored = Gateway(FakeEngine([]), FORMAT).restore("s", session.payloads(), **OPTIONS)
    assert restored.payloads() == session.payloads()
    assert restored.segments() == segments


@given(st.lists(COMPLETIONS, min_size=1, max_size=6))
@settings(deadline=None)
def test_a_client_that_only_appends_gets_one_segment(completions):
    engine = FakeEngine(completions)
    session = Gateway(engine, FORMAT).open("s", **OPTIONS)

    async def play() -> None:
        history: list[Message] = [user("§q§")]
        for number in range(len(completions)):
            answer = await session.chat(history, tools=[BASH])
            history = next_history("go on", [*history, answer.message], number)

    asyncio.run(play())
    assert len(session.segments()) == 1
