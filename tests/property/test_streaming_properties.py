"""Whatever a model samples, and however it is cut: the deltas, joined, are the message that is recorded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longarc.gateway.streaming import DeltaKind, TurnStream
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.glm import GlmFormat
from token_samples import BASH, chatml_tokenizer, qwen_tokenizer, small_tokenizer

FORMATS = {
    "glm-4.7": GlmFormat(small_tokenizer()),
    "glm-5.2": GlmFormat(small_tokenizer(), version="glm-5.2"),
    "smollm": ChatMlFormat(chatml_tokenizer()),
    "qwen": ChatMlFormat(qwen_tokenizer()),
}
TEXTS = (
    "a",
    " ",
    "\n",
    "  b \n",
    "é🦊",
    "<",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "call>",
    '{"name": "bash", "arguments": {"command": "ls"}}',
    "bash<arg_key>command</arg_key><arg_value> ls\n</arg_value>",
    "<|im_end|>",
    "<|user|>",
)


@st.composite
def completions(draw, name):
    """Ids of texts that mean something to the parser, among others, with control ids and halves of characters."""
    tokenizer = FORMATS[name].tokenizer
    special = tokenizer.special_tokens
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 14))):
        text = draw(st.sampled_from(TEXTS) | st.text(max_size=4))
        kind = draw(st.integers(0, 5))
        if kind == 0:
            ids.append(draw(st.integers(0, tokenizer.vocab_size + 1)))
        elif text in special and kind < 4:
            ids.append(special[text])
        elif kind == 1:
            ids += [i for char in text for i in tokenizer.encode(char)]
        else:
            for piece in text.replace("<", "\0<").replace(">", ">\0").split("\0"):
                ids += [special[piece]] if piece in special else tokenizer.encode(piece)
    return ids


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_joined_deltas_are_the_parsed_message(name, data):
    chat_format = FORMATS[name]
    ids = data.draw(completions(name))
    thinking = data.draw(st.booleans())
    stream = TurnStream(chat_format, [BASH], thinking=thinking, call_id_prefix="c")
    deltas = []
    start = 0
    while start < len(ids):
        end = start + data.draw(st.integers(1, 5))
        deltas += stream.feed(ids[start:end])
        start = end
    whole = chat_format.parse(ids, [BASH], thinking=thinking, call_id_prefix="c").message
    deltas += stream.finish(whole)

    def joined(kind):
        return "".join(d.text for d in deltas if d.kind is kind)

    assert joined(DeltaKind.REASONING) == (whole.reasoning or "")
    assert joined(DeltaKind.CONTENT) == whole.content
    assert tuple(d.call for d in deltas if d.call is not None) == whole.tool_calls
    assert all(d.text or d.call for d in deltas)
