"""Golden calls: what models really write, and what becomes of it."""

import json
import re
from pathlib import Path

import pytest

from longarc.records.message import ToolSpec
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.glm import GlmFormat
from template_cases import GROWING, template_format
from token_samples import chatml_tokenizer, small_tokenizer

DATA = json.loads((Path(__file__).parent / "data" / "tool_parsing.json").read_text())
TOOLS = [ToolSpec(**tool) for tool in DATA["tools"]]
FORMATS: dict[str, ChatFormat] = {
    "glm-4.5": GlmFormat(small_tokenizer(), version="glm-4.5"),
    "glm-4.7": GlmFormat(small_tokenizer()),
    "glm-5.2": GlmFormat(small_tokenizer(), version="glm-5.2"),
    "chatml": ChatMlFormat(chatml_tokenizer()),
    "template": template_format(GROWING),
}


def sampled_ids(chat_format, text):
    """Ids of a text in which control tokens are control tokens."""
    tokenizer = chat_format.tokenizer
    special = sorted(tokenizer.special_tokens, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return [
        token_id
        for piece in pieces
        for token_id in (
            [tokenizer.special_id(piece)] if piece in special else tokenizer.encode(piece)
        )
    ]


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(c, n, id=f"{n}-{c['name']}") for c in DATA["cases"] for n in c["formats"]],
)
def test_a_call_is_read_as_recorded(case, name):
    chat_format = FORMATS[name]
    ids = sampled_ids(chat_format, case["text"])
    turn = chat_format.parse([*ids, chat_format.stop_ids[-1]], TOOLS, thinking=False)
    found = [[c.name, c.arguments, c.error is not None] for c in turn.message.tool_calls]
    assert found == case["calls"]
