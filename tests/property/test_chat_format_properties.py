"""For all conversations: what is rendered is read back, and a longer history keeps its ids."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from longarc.records.message import Message, Role, ToolSpec
from longarc.tokens.glm import GlmFormat
from token_samples import assistant, call, small_tokenizer, text_of, tool, user

FORMATS = st.sampled_from(
    [GlmFormat(small_tokenizer()), GlmFormat(small_tokenizer(), version="glm-5.2")]
)
TOOL = ToolSpec(
    name="f",
    description="",
    parameters={
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "j": {"type": ["object", "array", "number", "boolean", "null"]},
        },
    },
)

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
json_values = st.recursive(
    scalars | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {}, optional={"s": st.text(), "j": json_values.filter(lambda v: not isinstance(v, str))}
)
stripped = st.text().map(str.strip)


@st.composite
def answers(draw):
    many = draw(st.lists(arguments, max_size=3))
    calls = tuple(call("f", call_id=f"call_{i}", **a) for i, a in enumerate(many))
    return assistant(draw(stripped), reasoning=draw(stripped) or None, calls=calls)


conversations = st.lists(
    st.tuples(
        answers(), st.lists(st.text().map(tool) | st.text().map(user), min_size=1, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


@given(FORMATS, answers())
def test_reading_a_rendered_answer_gives_the_answer(chat_format, message):
    # "</think>" typed inside a content without reasoning reads as reasoning by the template's own rule.
    if message.reasoning is None and "</think>" in message.content:
        return
    rendered = chat_format.render(
        [user("q"), message], [TOOL], thinking=True, add_generation_prompt=False
    )
    pairs = zip(rendered.token_ids, rendered.train_mask, strict=True)
    turn = chat_format.parse(
        [token for token, trained in pairs if trained],
        [TOOL],
        thinking=message.reasoning is not None,
    )
    assert turn.message == message
    assert turn.problems == ()


@given(FORMATS, st.booleans(), conversations)
def test_a_stored_history_with_its_tail_says_what_a_whole_render_says(
    chat_format, thinking, exchange
):
    messages: list[Message] = [user("q")]
    kept = {"thinking": thinking, "clear_thinking": False}
    for answer, replies in exchange:
        messages.append(answer)
        stored = chat_format.render(messages, [TOOL], add_generation_prompt=False, **kept).token_ids
        tail = chat_format.render_tail(replies, previous_stop_id=stored[-1], thinking=thinking)
        opens = "<|observation|>" if replies[0].role is Role.TOOL else "<|user|>"
        if stored[-1] != small_tokenizer().special_id(opens):
            stored = stored[:-1]  # the history of a turn that the policy ended otherwise
            tail = chat_format.render_tail(replies, previous_stop_id=None, thinking=thinking)
        messages += replies
        whole = chat_format.render(messages, [TOOL], add_generation_prompt=True, **kept).token_ids
        assert text_of(stored + tail) == text_of(whole)
        assert stored + tail == whole


@given(FORMATS, st.lists(st.integers(0, small_tokenizer().vocab_size - 1)), st.booleans())
def test_any_sampled_ids_can_be_read_and_valid_calls_have_json_arguments(
    chat_format, ids, thinking
):
    turn = chat_format.parse(ids, [TOOL], thinking=thinking)
    assert turn.message.role is Role.ASSISTANT
    for one in turn.message.tool_calls:
        assert (one.error is None) or one.arguments == {}


@given(
    FORMATS,
    st.lists(st.text().map(user) | st.text().map(tool) | answers(), min_size=1, max_size=6),
    st.data(),
)
def test_only_assistants_are_trained_and_never_their_prompt(chat_format, messages, data):
    # An answer of which nothing is shown (its reasoning can be cleared) samples nothing where another answer follows it,
    # not even the opening of the next turn.
    messages = [
        replace(m, content=m.content or ".") if m.role is after.role is Role.ASSISTANT else m
        for m, after in pairwise([*messages, user("")])
    ]
    untrained = data.draw(st.sets(st.sampled_from(range(len(messages)))))
    rendered = chat_format.render(
        messages, [TOOL], thinking=True, add_generation_prompt=False, untrained=untrained
    )
    spoken = {i for i, m in enumerate(messages) if m.role is Role.ASSISTANT}
    assert any(rendered.train_mask) == bool(spoken - untrained)
    prompt_ids = {small_tokenizer().special_id(t) for t in ("<|assistant|>", "<think>", "<sop>")}
    pairs = zip(rendered.token_ids, rendered.train_mask, strict=True)
    assert not prompt_ids & {token for token, trained in pairs if trained}
