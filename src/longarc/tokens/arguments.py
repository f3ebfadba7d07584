"""The arguments of tool calls: what a model wrote, as JSON values, without guessing.

A value whose schema says string is kept verbatim, blanks and newlines included; every other value is
JSON. What cannot be read becomes an error of that call alone: bad calls are data, and the next call of
the same turn still runs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from longarc.records.message import Json, ToolCall, ToolSpec

MAX_DEPTH = 100
"""Lists and objects within each other, in arguments of a call."""


def tool_function(tool: ToolSpec) -> dict[str, Json]:
    """Return a tool as the ``function`` object of the chat-completions wire format."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def dump_json(value: Json) -> str:
    """Write a value as chat templates do: separators with a blank, no escapes for non-ASCII."""
    return json.dumps(value, ensure_ascii=False)


def strict_json(text: str) -> Json:
    """Read JSON, without what Python would accept beyond it: NaN, Infinity, lone surrogates.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        value: Json = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:
            dump_json(value).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value


def check_depth(value: Json) -> None:
    """Refuse a value that whoever walks through it may have no stack for.

    Raises:
        ValueError: it is nested more than 100 deep.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, Mapping | list)
            for item in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not level:
            return
    raise ValueError("nested too deeply")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def argument_value(text: str, schema: Mapping[str, Json] | None) -> Json:
    """Return the value that a model wrote for one argument.

    Args:
        text: exactly what stood between the tags.
        schema: JSON Schema of the argument; None where the tool declares none, and then text that is
            not JSON is a string.

    Raises:
        ValueError: the schema asks for something other than a string and the text is not JSON.
    """
    kinds = _kinds(schema)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    try:
        return strict_json(text)
    except ValueError:
        if kinds:
            raise
        return text


def _kinds(schema: Mapping[str, Json] | None) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty where it does not say."""
    if not schema:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, Sequence):
        return frozenset(str(kind) for kind in declared)
    options = schema.get("enum")
    if isinstance(options, Sequence) and options and all(isinstance(o, str) for o in options):
        return frozenset({"string"})
    kinds: set[str] = set()
    for combiner in ("anyOf", "oneOf"):
        branches = schema.get(combiner)
        if isinstance(branches, Sequence) and not isinstance(branches, str):
            kinds.update(*(_kinds(branch) for branch in branches if isinstance(branch, Mapping)))
    return frozenset(kinds)


def argument_schemas(tools: Sequence[ToolSpec], name: str) -> Mapping[str, Json]:
    """Return the schemas of a tool's arguments by name; empty for a tool that does not exist."""
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def call_from_json(call_id: str, name: str, arguments: str) -> ToolCall:
    """Make a call from arguments in JSON text; ``""`` means no arguments.

    A text that is not a JSON object gives a call with ``error`` set.
    """
    if not arguments.strip():
        return ToolCall(id=call_id, name=name, arguments={})
    try:
        value = strict_json(arguments)
    except ValueError as error:
        reason = f"arguments are not JSON ({error}): {arguments!r}"
    else:
        if isinstance(value, Mapping):
            return ToolCall(id=call_id, name=name, arguments=value)
        reason = f"arguments must be a JSON object, got {arguments!r}"
    return ToolCall(id=call_id, name=name, arguments={}, error=reason)
