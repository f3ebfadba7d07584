"""Golden renders: the exact text of every format and mode, and which parts of it are trained."""

import json
from itertools import groupby
from pathlib import Path

import pytest

from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.glm import GlmFormat
from token_samples import chatml_tokenizer, small_tokenizer

CASES = json.loads((Path(__file__).parent / "data" / "chat_formats.json").read_text())["cases"]
FORMATS: dict[str, ChatFormat] = {
    "glm-4.5": GlmFormat(small_tokenizer(), version="glm-4.5"),
    "glm-4.7": GlmFormat(small_tokenizer()),
    "glm-5.2": GlmFormat(small_tokenizer(), version="glm-5.2"),
    "chatml": ChatMlFormat(chatml_tokenizer()),
}


def message(data):
    calls = tuple(
        ToolCall(id=f"call_{i}", name=c["name"], arguments=c["arguments"])
        for i, c in enumerate(data.get("tool_calls", ()))
    )
    return Message(
        role=Role(data["role"]),
        content=data["content"],
        reasoning=data.get("reasoning"),
        tool_calls=calls,
    )


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c['format']}-{c['name']}") for c in CASES])
def test_a_conversation_renders_to_the_recorded_text_and_mask(case):
    chat_format = FORMATS[case["format"]]
    rendered = chat_format.render(
        [message(m) for m in case["messages"]],
        [ToolSpec(**t) for t in case.get("tools", ())],
        **case["options"],
    )
    runs = []
    pairs = zip(rendered.token_ids, rendered.train_mask, strict=True)
    for trained, group in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token_id for token_id, _ in group]
        runs.append([chat_format.tokenizer.decode(ids, keep_special=True), int(trained)])
    assert runs == case["runs"]
