"""What agents send in the gateway's benchmarks, made beforehand: the bodies of each turn and the engine's answer."""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getsource
from typing import Any

import orjson

from longarc.tokens.formats import make_chat_format
from longarc.tokens.tokenizer import Tokenizer

TAG = "@@@@@@@@"
"""Stands in every message; the load generator writes the session's number over it, so that sessions differ."""
REPLY = (
    "Looking at the failing test first.\nThe parser keeps the option strings in a dictionary, so a prefix that fits "
    'two of them is ambiguous; I will print both names, add a case to "tests/test_args.py" and run it again to see '
    "whether the message says which of them was meant."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} in the workspace. Paths are relative to its root; output is cut after 16 KiB.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where."},
                    argument: {"type": "string", "description": "What."},
                },
                "required": ["path", argument],
            },
        },
    }
    for name, what, argument in (
        ("read_file", "Read a file", "lines"),
        ("edit_file", "Replace text", "replacement"),
        ("bash", "Run a command", "command"),
    )
]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A session's turns."""

    bodies: list[bytes]
    reply: str
    reply_ids: list[int]
    """With the id that ends the turn."""
    first: str
    """What the first piece of a streamed answer holds."""


def traffic(
    tokenizer: Tokenizer,
    *,
    num_turns: int,
    num_opening: int,
    message_chars: int,
    observation_chars: int,
    stream: bool = False,
    seed: int = 0,
) -> Traffic:
    """Return turns that each send the whole conversation.

    Args:
        tokenizer: ids of the reply are its own.
        num_turns: how often the agent asks.
        num_opening: messages of the first request behind the system message, an odd number: the user's and
            assistant's of an earlier conversation.
        message_chars: length of each of those.
        observation_chars: length of what the user says between two turns.
        stream: whether the answer is streamed.
        seed: of the choice of texts.
    """
    texts = _texts(random.Random(seed))
    messages: list[dict[str, Any]] = [
        {
            "role": "system",
            "content": f"You repair Python programs. Session {TAG}.\n{next(texts)[:1500]}",
        }
    ]
    for index in range(num_opening):
        role = "assistant" if index % 2 else "user"
        messages.append({"role": role, "content": f"{TAG} {_cut(texts, message_chars)}"})
    bodies = []
    for _ in range(num_turns):
        body: dict[str, Any] = {"model": "stub", "messages": messages, "tools": TOOLS}
        body |= {"max_tokens": 256, "temperature": 1.0}
        bodies.append(orjson.dumps(body | ({"stream": True} if stream else {})))
        messages = [
            *messages,
            {"role": "assistant", "content": REPLY},
            {"role": "user", "content": f"{TAG} {_cut(texts, observation_chars)}"},
        ]
    chats = make_chat_format("chatml", tokenizer)
    ids = [*tokenizer.encode(REPLY), chats.stop_ids[0]]
    first = orjson.dumps(tokenizer.decode(ids[:1])).decode().strip('"')
    return Traffic(bodies, REPLY, ids, f'"content":"{first}')


def _cut(texts: Iterator[str], chars: int) -> str:
    text = next(texts)
    while len(text) < chars:
        text += next(texts)
    return text[:chars].strip() or "."


def _texts(draw: random.Random) -> Iterator[str]:
    lines = (getsource(argparse) + getsource(random)).splitlines(keepends=True)
    while True:
        start = draw.randrange(len(lines) - 60)
        yield "".join(lines[start : start + 60])
