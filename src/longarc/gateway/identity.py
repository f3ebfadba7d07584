"""When two messages are the same message: the canonical identity that conversations are matched by.

Clients send history back in their own spelling: other call ids, reordered JSON keys, 1 for 1.0, content
as parts. None of that changes what was said, so none of it changes the identity. Text does, to the last
blank. Reasoning is compared apart (see ``tree``), because most clients of chat completions do not send
it back; a client that does send it must send what was sampled.

Clients also send things that are not said at all: Claude Code opens its system prompt with a billing
header whose end differs from agent to agent. ``without_billing`` removes it, so that neither the model
nor the identity sees it.

Keys form a chain, key[i] = hash(key[i-1], message[i]), so one key stands for a whole conversation.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from longarc.records.message import Json, Message, Role, ToolCall

_KEY_BYTES = 16
_BILLING_HEADER = "x-anthropic-billing-header:"

_sorted_json = json.JSONEncoder(sort_keys=True).encode


def opening_key(format_name: str, opening_ids: Sequence[int]) -> bytes:
    """Return the key that a chain starts from: the format and the ids before the first message."""
    return _digest(b"", format_name.encode(), json.dumps(list(opening_ids)).encode())


def next_key(previous: bytes, message: Message) -> bytes:
    """Return the key of a conversation that ends with ``message``."""
    calls = b""
    if message.tool_calls:
        calls = _sorted_json([_call(c) for c in message.tool_calls]).encode()
    return _digest(
        previous,
        message.role.value.encode(),
        message.content.encode("utf-8", "surrogatepass"),
        calls,
    )


def without_billing(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without billing headers: the same object where there are none.

    A header is the first line of a system message, or all of it.
    """
    if not any(m.role is Role.SYSTEM and m.content.startswith(_BILLING_HEADER) for m in messages):
        return messages
    kept: list[Message] = []
    for message in messages:
        if message.role is not Role.SYSTEM or not message.content.startswith(_BILLING_HEADER):
            kept.append(message)
        elif text := message.content.partition("\n")[2].lstrip("\n"):
            kept.append(replace(message, content=text))
    return kept


def _digest(previous: bytes, *parts: bytes) -> bytes:
    framed = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return hashlib.blake2b(b"".join([previous, *framed]), digest_size=_KEY_BYTES).digest()


def _call(call: ToolCall) -> list[Json]:
    # A malformed call holds no arguments, so it stays itself whether a client echoes its text or "{}".
    return [call.name, _canonical(call.arguments)]


def _canonical(value: Json) -> Json:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_canonical(item) for item in value]
    return value
