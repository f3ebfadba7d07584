"""What a client gets of an answer that a stop text ended: all that stands before it.

The tokens that spell the stop text were sampled, so they are kept and trained; only the message is cut.
"""

from collections.abc import Iterable
from dataclasses import replace

from longarc.records.message import Message


def first_stop(text: str, stops: Iterable[str]) -> str | None:
    """Return the stop text that comes first in a text, the longest of several at one place."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    return min(found)[2] if found else None


def cut_at_stop(message: Message, stop: str) -> Message:
    """Return a message without its first stop text and what follows."""
    if message.reasoning is not None and stop in message.reasoning:
        return replace(
            message, reasoning=message.reasoning.partition(stop)[0], content="", tool_calls=()
        )
    return replace(message, content=message.content.partition(stop)[0])
