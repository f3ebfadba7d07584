"""Records as JSON and back, losslessly: messages, tools, turns, and whole trajectories for people and programs.

The ledger's codec stores per-token fields as arrays (``codec``); ``trajectory_json`` spells them out as
JSON numbers: masks and versions in runs, log-probabilities only of sampled tokens.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, Final

from longarc.errors import ContractError, boundary
from longarc.records.constraint import ConstrainedSpan, Constraint
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.segment import NOT_SAMPLED, Segment, SegmentKind
from longarc.records.trajectory import Trajectory
from longarc.records.turn import Turn

_CONSTRAINT_FIELDS: Final = tuple(field.name for field in fields(Constraint))
PLAIN_FIELDS: Final = (
    "id",
    "stage",
    "group_id",
    "task_id",
    "family",
    "outcome",
    "reward",
    "reward_parts",
    "num_turns",
    "difficulty",
    "started_at_s",
    "duration_s",
    "error",
    "info",
)
"""Fields of a trajectory that are JSON as they are."""
FORMAT: Final = "longarc-trajectory-1"
"""What ``trajectory_to_json`` calls its form."""


def to_json(value: object) -> bytes:
    """Encode a JSON value, losslessly.

    The standard library and not orjson: NaN, integers beyond 64 bits and lone surrogates (which
    undecodable file names become) occur in what environments report, and must come back as they were.
    """
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def from_json(data: bytes) -> Any:
    """Decode what ``to_json`` wrote."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def to_json_line(value: object) -> str:
    """Encode a JSON value in ASCII, without a line break: what every reader of JSON lines can take."""
    return _ASCII_ENCODER.encode(value)


def message_to_json(message: Message) -> dict[str, object]:
    """Return a message as JSON, without what it lacks."""
    out: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": c.id, "name": c.name, "arguments": c.arguments}
            | ({} if c.error is None else {"error": c.error})
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    return out


def message_from_json(data: Mapping[str, Any]) -> Message:
    """Undo ``message_to_json``."""
    return Message(
        role=Role(data["role"]),
        content=data["content"],
        reasoning=data.get("reasoning"),
        tool_calls=tuple(ToolCall(**call) for call in data.get("tool_calls", ())),
        tool_call_id=data.get("tool_call_id"),
    )


def tools_to_json(tools: Sequence[ToolSpec]) -> list[dict[str, object]]:
    """Return tools as JSON."""
    return [
        {"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools
    ]


def tools_from_json(data: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Undo ``tools_to_json``."""
    return tuple(ToolSpec(**tool) for tool in data)


def turn_to_json(turn: Turn) -> dict[str, object]:
    """Return a turn as JSON."""
    return {
        "segment_order": turn.segment_order,
        "start": turn.start,
        "num_sampled": turn.num_sampled,
        "parent": turn.parent,
        "said": [message_to_json(message) for message in turn.said],
        "answer": message_to_json(turn.answer),
        "finish_reason": turn.finish_reason,
        "elapsed_s": turn.elapsed_s,
        **({"tools": tools_to_json(turn.tools)} if turn.tools else {}),
    }


def turn_from_json(data: Mapping[str, Any]) -> Turn:
    """Undo ``turn_to_json``."""
    read = {
        "said": tuple(message_from_json(message) for message in data["said"]),
        "answer": message_from_json(data["answer"]),
        "tools": tools_from_json(data.get("tools", ())),
    }
    return Turn(**{**data, **read})


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return all of a trajectory as JSON; ``trajectory_from_json`` gives the equal record back."""
    return {
        "format": FORMAT,
        **{name: getattr(trajectory, name) for name in PLAIN_FIELDS},
        "messages": [message_to_json(message) for message in trajectory.messages],
        "tools": tools_to_json(trajectory.tools),
        "turns": [turn_to_json(turn) for turn in trajectory.turns],
        "segments": [segment_to_json(segment) for segment in trajectory.segments],
    }


def trajectory_from_json(data: Mapping[str, Any]) -> Trajectory:
    """Undo ``trajectory_to_json``.

    Raises:
        ContractError: it is not what that wrote.
    """
    with boundary(ContractError, "a trajectory in JSON is damaged"):
        if data.get("format") != FORMAT:
            raise ContractError(
                f"a trajectory in JSON has format {data.get('format')!r}, this LongArc reads {FORMAT!r}"
            )
        plain = {name: data[name] for name in PLAIN_FIELDS}
        plain["outcome"] = Outcome(plain["outcome"])
        return Trajectory(
            messages=tuple(message_from_json(message) for message in data["messages"]),
            tools=tools_from_json(data["tools"]),
            turns=tuple(turn_from_json(turn) for turn in data["turns"]),
            segments=tuple(segment_from_json(segment) for segment in data["segments"]),
            **plain,
        )


def segment_to_json(segment: Segment) -> dict[str, Any]:
    """Return a segment as JSON; runs are lengths, beginning with how many tokens are not in the mask."""
    sampled = segment.is_sampled
    out: dict[str, Any] = {
        "order": segment.order,
        "kind": segment.kind,
        "agent_id": segment.agent_id,
        "parent_agent_id": segment.parent_agent_id,
        "window": segment.window,
        "parent": segment.parent,
        "token_ids": segment.token_ids,
        "sampled_runs": _runs(sampled),
        "trained_runs": _runs(segment.train_mask),
        "logprobs": [p for p, s in zip(segment.behaviour_logprobs, sampled, strict=True) if s],
        "version_runs": _value_runs(
            v for v, s in zip(segment.policy_versions, sampled, strict=True) if s
        ),
    }
    if segment.kept_ids is not None:
        out["kept_ids"] = segment.kept_ids
    if segment.constraints:
        out["constraints"] = [constrained_to_json(span) for span in segment.constraints]
    if segment.routing is not None:
        out["routing"] = [b64encode(blob).decode("ascii") for blob in segment.routing]
    return out


def segment_from_json(data: Mapping[str, Any]) -> Segment:
    """Undo ``segment_to_json``."""
    token_ids = tuple(data["token_ids"])
    sampled = _mask(data["sampled_runs"])
    logprobs = iter(data["logprobs"])
    versions = (v for v, length in data["version_runs"] for _ in range(length))
    kept, routing = data.get("kept_ids"), data.get("routing")
    return Segment(
        token_ids=token_ids,
        is_sampled=sampled,
        train_mask=_mask(data["trained_runs"]),
        behaviour_logprobs=tuple(next(logprobs) if s else 0.0 for s in sampled),
        policy_versions=tuple(next(versions) if s else NOT_SAMPLED for s in sampled),
        kept_ids=None if kept is None else tuple(tuple(ids) for ids in kept),
        constraints=tuple(constrained_from_json(span) for span in data.get("constraints", ())),
        routing=None if routing is None else tuple(map(b64decode, routing)),
        kind=SegmentKind(data["kind"]),
        order=data["order"],
        parent=data["parent"],
        agent_id=data["agent_id"],
        parent_agent_id=data["parent_agent_id"],
        window=data["window"],
    )


def constrained_to_json(span: ConstrainedSpan) -> dict[str, Any]:
    """Return a constrained span as JSON."""
    return {
        "start": span.start,
        "stop": span.stop,
        "stop_ids": list(span.stop_ids),
        **constraint_to_json(span.constraint),
    }


def constrained_from_json(data: Mapping[str, Any]) -> ConstrainedSpan:
    """Undo ``constrained_to_json``."""
    return ConstrainedSpan(
        start=data["start"],
        stop=data["stop"],
        stop_ids=tuple(data["stop_ids"]),
        constraint=constraint_from_json(data),
    )


def constraint_to_json(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as JSON."""
    return {name: getattr(constraint, name) for name in _CONSTRAINT_FIELDS}


def constraint_from_json(data: Mapping[str, Any]) -> Constraint:
    """Undo ``constraint_to_json``; other keys are left alone."""
    return Constraint(**{name: data[name] for name in _CONSTRAINT_FIELDS})


def _runs(mask: Sequence[bool]) -> list[int]:
    runs = [0] if mask and mask[0] else []
    return runs + [len(list(run)) for _, run in groupby(mask)]


def _mask(runs: Sequence[int]) -> tuple[bool, ...]:
    return tuple(index % 2 == 1 for index, length in enumerate(runs) for _ in range(length))


def _value_runs(values: Iterable[int]) -> list[list[int]]:
    return [[value, len(list(run))] for value, run in groupby(values)]


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} is not a JSON value")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
_ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain)
