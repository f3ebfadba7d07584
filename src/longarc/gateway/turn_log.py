"""The turn log: one payload per turn, from which a session's tree is rebuilt byte for byte.

A payload is UTF-8 JSON with the fields of ``tree.Node``: arrays as lists, digests in hexadecimal,
log-probabilities in the shortest form that reads back as the same double, the answer as an object of
``content``, ``reasoning`` and ``tool_calls`` (lists of id, name, arguments as JSON text, error), and
``format``, which is 1. ``kept_ids`` is there only where sampling left tokens out, ``routing`` (base64)
only where it was asked for, ``constrained`` (the constraint's fields, and the ids that end it) only where
there is a constraint, ``serial``, ``request`` and ``body``
where they were given, and ``asked`` where the client owns its context; a payload without them has the bytes it
always had. It is written before the answer is returned, so whatever a client saw is in the log.
"""

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final, TypeAlias

import orjson

from longarc.errors import ContractError, boundary
from longarc.gateway.asked import Asked
from longarc.gateway.tree import Node, id_array
from longarc.records.constraint import Constraint
from longarc.records.lineage import Lineage
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.segment import SegmentKind
from longarc.runs.record_json import constraint_from_json, constraint_to_json

TurnLog: TypeAlias = Callable[[str, int, bytes], None]
"""Called with session id, turn index and payload; returns when the payload is durable."""

_FORMAT: Final = 1
_LINEAGE_FIELDS: Final = tuple(field.name for field in fields(Lineage))


def encode_turn(node: Node) -> bytes:
    """Return the payload of a turn."""
    message = node.message
    head: dict[str, Any] = {
        "format": _FORMAT,
        "index": node.index,
        "parent": node.parent,
        "key": node.key.hex(),
        "num_messages": node.num_messages,
        "context_ids": node.context_ids.tolist(),
        "sampled_ids": node.sampled_ids.tolist(),
        "logprobs": node.logprobs.tolist(),
        "version_runs": node.version_runs,
        "finish_reason": node.finish_reason,
        "ids_digest": node.ids_digest.hex(),
        "message": {
            "content": message.content,
            "reasoning": message.reasoning,
            # As text: arguments may hold integers of any size, which this encoder refuses.
            "tool_calls": [
                [call.id, call.name, json.dumps(call.arguments), call.error]
                for call in message.tool_calls
            ],
        },
    }
    if node.kept_ids:
        head["kept_ids"] = node.kept_ids
    if node.constrained is not None:
        constraint, stop_ids = node.constrained
        head["constrained"] = [constraint_to_json(constraint), stop_ids]
    if node.routing:
        head["routing"] = [b64encode(blob).decode("ascii") for blob in node.routing]
    if node.serial not in (-1, node.index):
        head["serial"] = node.serial
    if node.request:
        head["request"] = node.request.hex()
    if node.body:
        head["body"] = node.body.hex()
    if node.asked is not None:
        head["asked"] = _asked_json(node.asked)
    return orjson.dumps(head)


def decode_turn(payload: bytes) -> Node:
    """Return the turn of a payload.

    Raises:
        ContractError: it is damaged or was written by another version.
    """
    with boundary(ContractError, "a turn-log payload is damaged"):
        data = orjson.loads(payload)
        if data["format"] != _FORMAT:
            raise ContractError(
                f"a turn-log payload has format {data['format']!r}, this version reads {_FORMAT}: "
                f"resume with the version that wrote it"
            )
        message = data["message"]
        return Node(
            index=data["index"],
            parent=data["parent"],
            key=bytes.fromhex(data["key"]),
            num_messages=data["num_messages"],
            context_ids=id_array(data["context_ids"]),
            sampled_ids=id_array(data["sampled_ids"]),
            logprobs=array("d", data["logprobs"]),
            version_runs=tuple((version, length) for version, length in data["version_runs"]),
            finish_reason=data["finish_reason"],
            ids_digest=bytes.fromhex(data["ids_digest"]),
            kept_ids=tuple(tuple(ids) for ids in data.get("kept_ids", ())),
            constrained=_constrained(data.get("constrained")),
            routing=tuple(map(b64decode, data.get("routing", ()))),
            serial=data.get("serial", data["index"]),
            request=bytes.fromhex(data.get("request", "")),
            body=bytes.fromhex(data.get("body", "")),
            asked=_asked_from_json(data["asked"]) if "asked" in data else None,
            message=Message(
                role=Role.ASSISTANT,
                content=message["content"],
                reasoning=message["reasoning"],
                tool_calls=tuple(
                    ToolCall(id=call_id, name=name, arguments=json.loads(arguments), error=error)
                    for call_id, name, arguments, error in message["tool_calls"]
                ),
            ),
        )


def _constrained(data: list[Any] | None) -> tuple[Constraint, tuple[int, ...]] | None:
    return None if data is None else (constraint_from_json(data[0]), tuple(data[1]))


def _asked_json(asked: Asked) -> dict[str, Any]:
    lineage = {name: getattr(asked.lineage, name) for name in _LINEAGE_FIELDS}
    return {
        "lineage": {name: value for name, value in lineage.items() if value is not None},
        # As text: clients may send lone surrogates and integers of any size.
        "said": json.dumps([_said_json(message) for message in asked.said]),
        "tools": json.dumps([[t.name, t.description, t.parameters] for t in asked.tools]),
        "opening": asked.opening.hex(),
        "max_new_tokens": asked.max_new_tokens,
        "hint": asked.hint,
        "echoes": asked.echoes,
        "carries": asked.carries,
        "elapsed_s": asked.elapsed_s,
    }


def _asked_from_json(data: dict[str, Any]) -> Asked:
    lineage = dict(data["lineage"])
    if "kind" in lineage:
        lineage["kind"] = SegmentKind(lineage["kind"])
    return Asked(
        lineage=Lineage(**lineage),
        said=tuple(_said_from_json(*parts) for parts in json.loads(data["said"])),
        tools=tuple(
            ToolSpec(name=name, description=description, parameters=parameters)
            for name, description, parameters in json.loads(data["tools"])
        ),
        opening=bytes.fromhex(data["opening"]),
        max_new_tokens=data["max_new_tokens"],
        hint=None if data["hint"] is None else SegmentKind(data["hint"]),
        echoes=data["echoes"],
        carries=data["carries"],
        elapsed_s=data["elapsed_s"],
    )


def _said_json(message: Message) -> list[Any]:
    calls = [[c.id, c.name, c.arguments, c.error] for c in message.tool_calls]
    return [message.role, message.content, message.reasoning, calls, message.tool_call_id]


def _said_from_json(
    role: str, content: str, reasoning: str | None, calls: list[Any], tool_call_id: str | None
) -> Message:
    return Message(
        role=Role(role),
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(id=call_id, name=name, arguments=arguments, error=error)
            for call_id, name, arguments, error in calls
        ),
        tool_call_id=tool_call_id,
    )
