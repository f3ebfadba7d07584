"""For all conversations: what a template writes is what transformers would, and tails are what a whole render adds."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longarc.records.message import Message, ToolSpec
from longarc.tokens.chat_format import StoredTurn
from longarc.tokens.glm import GlmFormat
from template_cases import FORGETTING, GROWING, MARKED, MOVING, ROLES, template_format, wire
from token_samples import assistant, call, small_tokenizer, text_of, tool, user

TOOL = ToolSpec(
    name="f",
    description="",
    parameters={"type": "object", "properties": {"s": {"type": "string"}}},
)
words = st.text().map(str.strip)


@st.composite
def answers(draw, with_calls=True):
    many = draw(st.lists(st.text(), max_size=2)) if with_calls else []
    calls = tuple(call("f", call_id=f"call_{i}", s=text) for i, text in enumerate(many))
    return assistant(draw(words), reasoning=draw(words) or None, calls=calls)


@st.composite
def exchanges(draw):
    """A question, then answers with what follows them; the last one has nothing behind it yet."""
    messages: list[Message] = [user(draw(st.text()))]
    for _ in range(draw(st.integers(0, 3))):
        messages.append(draw(answers()))
        messages += draw(
            st.lists(st.text().map(tool) | st.text().map(user), min_size=1, max_size=2)
        )
    return [*messages, draw(answers())]


@cache
def transformers_tokenizer(chat_format):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=chat_format.tokenizer._inner,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )


def wire_tools():
    function = {"name": TOOL.name, "description": "", "parameters": TOOL.parameters}
    return [{"type": "function", "function": function}]


@pytest.mark.parametrize("source", [GROWING, FORGETTING, ROLES, MOVING, MARKED])
@settings(max_examples=60, deadline=None)
@given(messages=exchanges(), thinking=st.booleans(), opens=st.booleans())
def test_ids_are_those_that_transformers_gives(source, messages, thinking, opens):
    chat_format = template_format(source)
    shows_tools = source not in (MOVING, MARKED)
    said = repr(messages)
    assume(not any(token in said for token in chat_format.tokenizer.special_tokens))
    expected = transformers_tokenizer(chat_format).apply_chat_template(
        [wire(message) for message in messages],
        tools=wire_tools() if shows_tools else None,
        chat_template=source,
        add_generation_prompt=opens,
        tokenize=False,
        enable_thinking=thinking,
        clear_thinking=False,
        thinking=thinking,
    )
    ours = chat_format._template.render(
        messages,
        [TOOL] if shows_tools else [],
        thinking=thinking,
        clear_thinking=False,
        add_generation_prompt=opens,
    )
    assert chat_format._template.plain(ours.text) == expected
    if opens:
        ids = chat_format.render(
            messages,
            [TOOL] if shows_tools else [],
            thinking=thinking,
            clear_thinking=False,
            add_generation_prompt=True,
        ).token_ids
        # The same text may be cut otherwise where a prompt ends inside it, but control tokens stand where they stood.
        assert chat_format.tokenizer.decode(ids, keep_special=True).encode() == expected.encode(
            "utf-8", "replace"
        )
        assert list(ids) == chat_format.tokenizer.encode_with_control(expected)


@pytest.mark.parametrize("source", [GROWING, FORGETTING, ROLES, MOVING])
@settings(max_examples=60, deadline=None)
@given(messages=exchanges(), thinking=st.booleans(), data=st.data())
def test_a_tail_is_what_a_whole_render_adds_or_it_is_refused(source, messages, thinking, data):
    chat_format = template_format(source)
    tools = [] if source == MOVING else [TOOL]
    if source == MOVING:  # it shows no calls
        messages = [replace(message, tool_calls=()) for message in messages]
    replies = data.draw(st.lists(st.text().map(tool) | st.text().map(user), min_size=1, max_size=2))
    options = {"thinking": thinking, "clear_thinking": False, "add_generation_prompt": True}
    prompt = chat_format.render(messages[:-1], tools, **options).token_ids
    whole = chat_format.render([*messages, *replies], tools, **options).token_ids
    turn = StoredTurn(
        prompt_ids=prompt,
        sampled_ids=(chat_format.stop_ids[-1],),
        messages=messages,
        tools=tools,
    )
    tail = chat_format.tail_after(turn, replies, thinking=thinking)
    grows = whole[: len(prompt)] == prompt
    if tail is None:
        assert not grows or source != GROWING, "what grows is continued"
        return
    assert grows
    assert whole[-len(tail) :] == tail, "the tail is the end of what the model would be shown"


@settings(max_examples=100, deadline=None)
@given(messages=exchanges(), thinking=st.booleans(), data=st.data())
def test_glm_4_5_grows_by_its_tails(messages, thinking, data):
    chat_format = GlmFormat(small_tokenizer(), version="glm-4.5")
    replies = data.draw(st.lists(st.text().map(tool) | st.text().map(user), min_size=1, max_size=2))
    kept = {"thinking": thinking, "clear_thinking": False}
    stored = chat_format.render(messages, [TOOL], add_generation_prompt=False, **kept).token_ids
    whole = chat_format.render(
        [*messages, *replies], [TOOL], add_generation_prompt=True, **kept
    ).token_ids
    opens = "<|observation|>" if replies[0].role == "tool" else "<|user|>"
    closed = stored[-1] == small_tokenizer().special_id(opens)
    turn = StoredTurn(
        prompt_ids=(), sampled_ids=stored if closed else stored[:-1] or (0,), messages=messages
    )
    tail = chat_format.tail_after(turn, replies, thinking=thinking)
    kept_ids = stored if closed else stored[:-1]
    assert text_of(kept_ids + tail) == text_of(whole)
    assert kept_ids + tail == whole


@settings(max_examples=100, deadline=None)
@given(message=answers(), thinking=st.booleans())
def test_glm_4_5_reads_what_it_wrote(message, thinking):
    chat_format = GlmFormat(small_tokenizer(), version="glm-4.5")
    if message.reasoning is None and "</think>" in message.content:
        return
    chat = chat_format.render(
        [user("q"), message], [TOOL], thinking=thinking, add_generation_prompt=False
    )
    said = [t for t, m in zip(chat.token_ids, chat.train_mask, strict=True) if m]
    turn = chat_format.parse(said, [TOOL], thinking=thinking)
    assert turn.message == message
    assert turn.problems == () or (message.reasoning is not None and not thinking)
