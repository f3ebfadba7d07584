"""Reads an answer whose tool calls are JSON inside ``<tool_call>`` tags, as Hermes, Qwen and many others write them.

What cannot be read becomes an error of that call alone; the next call of the same turn still runs.
"""

import re
from collections.abc import Mapping
from typing import Final

from longarc.records.message import Message, Role, ToolCall
from longarc.tokens.arguments import call_from_json, dump_json, strict_json
from longarc.tokens.chat_format import ParsedTurn

_CALL: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_NAME: Final = re.compile(r'"name"\s*:\s*"([^"\\]*)"')


def parse_tagged(text: str, *, prompt_opens_thinking: bool, call_id_prefix: str) -> ParsedTurn:
    """Read a completion; never raises for what a model wrote.

    Args:
        text: the completion without what ended it, control tokens as text.
        prompt_opens_thinking: the completion begins inside the reasoning. Where it begins with ``<think>``, there is
            reasoning too.
        call_id_prefix: the n-th call gets the id ``{prefix}_{n}``.
    """
    problems: list[str] = []
    reasoning: str | None = None
    if prompt_opens_thinking or text.lstrip().startswith("<think>"):
        before, closing, text = text.partition("</think>")
        if not closing:
            problems.append("reasoning without </think>")
        # Only at the beginning: a later one is text, or reasoning that was streamed would vanish.
        reasoning = before.lstrip().removeprefix("<think>")
    calls = tuple(
        _read_call(match, f"{call_id_prefix}_{index}")
        for index, match in enumerate(_CALL.finditer(text))
    )
    problems += [f"tool call {i} ({c.name!r}): {c.error}" for i, c in enumerate(calls) if c.error]
    message = Message(
        role=Role.ASSISTANT,
        content=_CALL.sub("", text).strip(),
        reasoning=(reasoning or "").strip() or None,
        tool_calls=calls,
    )
    return ParsedTurn(message=message, problems=tuple(problems))


def _read_call(match: re.Match[str], call_id: str) -> ToolCall:
    """Read ``{"name": ..., "arguments": {...}}``; arguments may also be JSON inside a string."""
    text, closing = match.group(1), match.group(2)
    named = _NAME.search(text)
    name = named.group(1) if named else ""
    try:
        if not closing:
            raise ValueError("the call is not closed by </tool_call>")
        value = strict_json(text)
        fields = value if isinstance(value, Mapping) else {}
        written, arguments = fields.get("name"), fields.get("arguments", {})
        if not isinstance(written, str) or not written:
            raise ValueError("it names no function")
        if isinstance(arguments, Mapping):
            return ToolCall(id=call_id, name=written, arguments=arguments)
    except ValueError as error:
        reason = f"the call cannot be read ({error}): {text!r}"
        return ToolCall(id=call_id, name=name, arguments={}, error=reason)
    return call_from_json(
        call_id, written, arguments if isinstance(arguments, str) else dump_json(arguments)
    )
