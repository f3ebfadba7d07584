"""A small tokenizer and conversations that several test folders use."""

import re
from functools import cache

from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.tokens.tokenizer import GLM_SPECIAL_TOKENS, Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog; cat data/notes.txt | grep 'code word'\n",
    "def main(path):\n    return open(path).read()\n\nprint('hello world, this is a small text')\n",
    "ls -l data/archive/report.txt\nThe answer is the word that the last file names.\n",
] * 3


@cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer.train(CORPUS, vocab_size=320)


@cache
def chatml_tokenizer() -> Tokenizer:
    """As SmolLM2's: only the ends of messages are control tokens, tags are text."""
    return Tokenizer.train(
        CORPUS, vocab_size=300, special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    )


@cache
def qwen_tokenizer() -> Tokenizer:
    """As Qwen3's: tags are control tokens too."""
    names = ("think", "tool_call", "tool_response")
    tags = tuple(tag for name in names for tag in (f"<{name}>", f"</{name}>"))
    return Tokenizer.train(
        CORPUS,
        vocab_size=310,
        special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *tags),
    )


_CONTROL = re.compile("(" + "|".join(map(re.escape, GLM_SPECIAL_TOKENS)) + ")")


def sampled(text: str) -> list[int]:
    """Ids of a text in which control tokens are control tokens, spelled as the tokenizer would not.

    Every character stands on its own, so encoding the decoded text again gives other ids.
    """
    tokenizer = small_tokenizer()
    out: list[int] = []
    for piece in _CONTROL.split(text):
        if piece in GLM_SPECIAL_TOKENS:
            out.append(tokenizer.special_id(piece))
        else:
            out += [i for char in piece for i in tokenizer.encode(char)]
    return out


def text_of(token_ids: object) -> str:
    """Text of some ids, control tokens included."""
    return small_tokenizer().decode(list(token_ids), keep_special=True)


BASH = ToolSpec(
    name="bash",
    description="Run a command.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
        "required": ["command"],
    },
)
WEATHER = ToolSpec(
    name="get_weather",
    description="Weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "zip": {"type": "string"},
            "n": {"type": "integer"},
        },
    },
)


def system(text: str) -> Message:
    return Message(role=Role.SYSTEM, content=text)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def tool(text: str, *, call_id: str = "call_0") -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=call_id)


def assistant(
    text: str = "", *, reasoning: str | None = None, calls: tuple[ToolCall, ...] = ()
) -> Message:
    return Message(role=Role.ASSISTANT, content=text, reasoning=reasoning, tool_calls=calls)


def call(name: str, *, call_id: str = "call_0", **arguments: object) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)
