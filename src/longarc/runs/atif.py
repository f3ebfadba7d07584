"""Trajectories as ATIF v1.8 documents, the Agent Trajectory Interchange Format that Harbor reads and writes.

One document is one trajectory. The main agent's turns are its steps; every other agent, and every side request, is
an embedded sub-agent trajectory, which the step before it refers to. An agent step has the exact prompt and
completion ids, the log-probabilities and the versions of its turn. ``extra.longarc`` holds the whole record, so that
a document of ours comes back equal (``atif_record``, ``atif_import``).

Everything outside that record is plain JSON for any reader: no NaN, no lone surrogates.

Source: Harbor RFC 0001, "Agent Trajectory Interchange Format", v1.8.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from typing import Any, Final, TypeAlias

from longarc.errors import ContractError, boundary
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.segment import MAIN_AGENT, Segment, SegmentKind
from longarc.records.trajectory import Trajectory
from longarc.records.turn import Turn
from longarc.runs.atif_document import ATIF_VERSION
from longarc.runs.atif_record import KEY, record_to_extra
from longarc.runs.rows import storable_text

_Said: TypeAlias = tuple[Role, str, str | None]
"""Role, content and, of a result, its call."""

_MAX_TIME_S: Final = 253_402_300_800.0
"""The year 10000, which ISO 8601 has no timestamp for [seconds since the epoch]."""


def trajectory_to_atif(trajectory: Trajectory, *, with_prompt_ids: bool = True) -> dict[str, Any]:
    """Return a trajectory as an ATIF document, which is JSON.

    Args:
        trajectory: of a white-box environment or of a client that owns its context.
        with_prompt_ids: whether each agent step repeats its whole prompt, as the format has it. Without, a long
            trajectory takes a fraction of the room, and the record still has every prompt.

    Raises:
        ContractError: it holds what is no JSON, or JSON that is nested too deep for Python.
    """
    with boundary(ContractError, f"trajectory {trajectory.id!r} cannot be written as ATIF"):
        documents = _Documents(trajectory, with_prompt_ids=with_prompt_ids)
        if trajectory.turns:
            documents.add_turns()
        else:
            documents.add_messages()
        return documents.finished()


@dataclass(frozen=True, slots=True)
class _Completion:
    """The tokens of one agent step."""

    segment: Segment
    start: int
    end: int


@dataclass(slots=True)
class _Document:
    """One agent's steps."""

    agent_id: str
    tools: tuple[ToolSpec, ...] = ()
    kind: SegmentKind = SegmentKind.EXEC
    steps: list[dict[str, Any]] = field(default_factory=list)
    seen: set[_Said] = field(default_factory=set)
    """What was said and answered."""

    def say_all(self, messages: Sequence[Message], *, opens: bool) -> None:
        """Add messages behind those that are here; a conversation that opens anew repeats some of these."""
        seen = frozenset(self.seen) if opens else frozenset()
        for message in messages:
            self.say(message, is_copied=_said(message) in seen)

    def say(self, message: Message, *, is_copied: bool = False) -> None:
        """Add a message that was not sampled for this step."""
        self.seen.add(_said(message))
        if message.role is Role.TOOL:
            if not is_copied:
                self._observe(message)
            return
        source = "agent" if message.role is Role.ASSISTANT else message.role.value
        step: dict[str, Any] = {"source": source, "message": _text(message.content)}
        if message.role is Role.ASSISTANT:
            # It was sampled before, or by nobody: nothing to learn from here.
            step |= _spoken(message)
            is_copied = True
        if is_copied:
            step["is_copied_context"] = True
        self._add(step)

    def answer(
        self, message: Message, metrics: Mapping[str, Any] | None, *, at_s: float | None
    ) -> None:
        """Add what the policy sampled [at_s: seconds since the epoch]."""
        self.seen.add(_said(message))
        step: dict[str, Any] = {"source": "agent", "message": _text(message.content)}
        step |= _spoken(message)
        step["llm_call_count"] = 1
        if metrics is not None:
            step["metrics"] = dict(metrics)
        if at_s is not None and 0 < at_s < _MAX_TIME_S:
            step["timestamp"] = datetime.fromtimestamp(at_s, UTC).isoformat()
        self._add(step)

    def refer(self, trajectory_id: str) -> None:
        """Note that the newest agent step started another agent."""
        for step in reversed(self.steps):
            if step["source"] == "agent":
                self._result(step, {"subagent_trajectory_ref": [{"trajectory_id": trajectory_id}]})
                return

    def _observe(self, message: Message) -> None:
        content = _text(message.content)
        call_id = None if message.tool_call_id is None else _text(message.tool_call_id)
        for step in reversed(self.steps):
            if call_id in [call["tool_call_id"] for call in step.get("tool_calls", ())]:
                self._result(step, {"source_call_id": call_id, "content": content})
                return
        step = {"source": "system", "message": ""}
        self._result(step, {"content": content})
        self._add(step)

    def _result(self, step: dict[str, Any], result: dict[str, Any]) -> None:
        step.setdefault("observation", {"results": []})["results"].append(result)

    def _add(self, step: dict[str, Any]) -> None:
        self.steps.append({"step_id": len(self.steps) + 1, **step})


class _Documents:
    """All agents of one trajectory."""

    def __init__(self, trajectory: Trajectory, *, with_prompt_ids: bool) -> None:
        self._trajectory = trajectory
        self._with_prompt_ids = with_prompt_ids
        self._main: _Document | None = None
        self._others: dict[str, _Document] = {}
        self._notes: list[str] = []

    def add_turns(self) -> None:
        """Add what a client that owns its context said and got."""
        segments = {segment.order: segment for segment in self._trajectory.segments}
        for turn in self._trajectory.turns:
            segment = segments.get(turn.segment_order)
            document = self._document_of(segment, turn)
            document.say_all(turn.said, opens=turn.parent is None)
            metrics = None
            if segment is not None:
                completion = _Completion(segment, turn.start, turn.start + turn.num_sampled)
                metrics = self._metrics(completion)
            at_s = self._trajectory.started_at_s + turn.elapsed_s
            is_known = self._trajectory.started_at_s > 0
            document.answer(turn.answer, metrics, at_s=at_s if is_known else None)

    def add_messages(self) -> None:
        """Add the conversation of a white-box environment, with the tokens where they can be told apart."""
        trajectory = self._trajectory
        document = self._main = _Document(_main_agent(trajectory), trajectory.tools)
        answers = sum(message.role is Role.ASSISTANT for message in trajectory.messages)
        completions = list(_completions(trajectory.segments))
        is_told_apart = len(completions) == trajectory.num_turns <= answers
        if completions and not is_told_apart:
            self._notes.append(
                f"The policy completed {len(completions)} texts in {trajectory.num_turns} turns, and {answers} messages are "
                f"the agent's, so steps have no token ids; extra.{KEY}.record has them all."
            )
        num_given = answers - trajectory.num_turns if is_told_apart else 0
        for message in trajectory.messages:
            if message.role is not Role.ASSISTANT or num_given > 0:
                # The first answers of a task that shows some were given with it.
                num_given -= message.role is Role.ASSISTANT
                document.say(message)
            else:
                metrics = self._metrics(completions.pop(0)) if is_told_apart else None
                document.answer(message, metrics, at_s=None)

    def finished(self) -> dict[str, Any]:
        """Return the main agent's document with all others in it."""
        trajectory = self._trajectory
        main = self._main or _Document(_main_agent(trajectory), trajectory.tools)
        if not main.steps:
            self._notes.append("The main agent has no conversation.")
            main.say(Message(role=Role.SYSTEM, content=""))
        others = list(self._others.values())
        steps = [step for document in (main, *others) for step in document.steps]
        metrics = [step["metrics"] for step in steps if "metrics" in step]
        out = self._head(main, _text(trajectory.id))
        out["session_id"] = _text(trajectory.id)
        if self._notes:
            out["notes"] = " ".join(self._notes)
        out["final_metrics"] = {
            "total_prompt_tokens": sum(m["prompt_tokens"] for m in metrics),
            "total_completion_tokens": sum(m["completion_tokens"] for m in metrics),
            "total_steps": len(main.steps),
            "extra": {
                "outcome": trajectory.outcome.value,
                "reward": trajectory.reward,
                "reward_parts": _value(trajectory.reward_parts),
            },
        }
        if self._others:
            out["subagent_trajectories"] = [
                self._head(document, trajectory_id)
                for trajectory_id, document in self._others.items()
            ]
        out["extra"] = {KEY: record_to_extra(trajectory, out)}
        return out

    def _head(self, document: _Document, trajectory_id: str) -> dict[str, Any]:
        agent: dict[str, Any] = {
            "name": _text(self._trajectory.family),
            "version": version("longarc"),
            "extra": {"agent_id": _text(document.agent_id), "kind": document.kind.value},
        }
        if document.tools:
            agent["tool_definitions"] = [_tool(tool) for tool in document.tools]
        return {
            "schema_version": ATIF_VERSION,
            "trajectory_id": trajectory_id,
            "agent": agent,
            "steps": document.steps,
        }

    def _document_of(self, segment: Segment | None, turn: Turn) -> _Document:
        """Return the document that a turn belongs to, made and referred to where it is new."""
        is_side = segment is not None and segment.kind is SegmentKind.SIDE
        if segment is None or (segment.parent_agent_id is None and not is_side):
            if self._main is None:
                agent_id = MAIN_AGENT if segment is None else segment.agent_id
                self._main = _Document(agent_id, self._trajectory.tools or turn.tools)
            return self._main
        trajectory_id = self._inner_id(f"side-{segment.order}" if is_side else segment.agent_id)
        if trajectory_id not in self._others:
            kind = SegmentKind.SIDE if is_side else SegmentKind.EXEC
            self._others[trajectory_id] = _Document(segment.agent_id, turn.tools, kind)
            above = self._others.get(self._inner_id(segment.parent_agent_id or ""), self._main)
            if above is not None and not is_side:
                above.refer(trajectory_id)
        return self._others[trajectory_id]

    def _inner_id(self, name: str) -> str:
        return f"{_text(self._trajectory.id)}#{_text(name)}"

    def _metrics(self, completion: _Completion) -> dict[str, Any]:
        segment, start, end = completion.segment, completion.start, completion.end
        versions = segment.policy_versions[start:end]
        logprobs = list(segment.behaviour_logprobs[start:end])
        out: dict[str, Any] = {
            "prompt_tokens": start,
            "completion_tokens": end - start,
            "completion_token_ids": list(segment.token_ids[start:end]),
            "extra": {
                "policy_versions": [[v, len(list(run))] for v, run in groupby(versions)],
                "segment": segment.order,
                "window": segment.window,
                "kind": segment.kind.value,
            },
        }
        if all(map(math.isfinite, logprobs)):
            out["logprobs"] = logprobs
        if self._with_prompt_ids:
            out["prompt_token_ids"] = list(segment.token_ids[:start])
        return out


def _said(message: Message) -> _Said:
    return message.role, message.content, message.tool_call_id


def _main_agent(trajectory: Trajectory) -> str:
    mains = [s.agent_id for s in trajectory.segments if s.parent_agent_id is None]
    return mains[0] if mains else MAIN_AGENT


def _completions(segments: Sequence[Segment]) -> Iterator[_Completion]:
    """Yield what was sampled at work: between two completions stands at least the token that opens the next."""
    for segment in segments:
        if segment.kind is not SegmentKind.EXEC:
            continue
        position = 0
        for (_, is_own), run in groupby(zip(segment.is_sampled, segment.train_mask, strict=True)):
            length = len(list(run))
            if is_own:
                yield _Completion(segment, position, position + length)
            position += length


def _spoken(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if message.reasoning is not None:
        out["reasoning_content"] = _text(message.reasoning)
    if message.tool_calls:
        out["tool_calls"] = [_call(call) for call in message.tool_calls]
    return out


def _call(call: ToolCall) -> dict[str, Any]:
    out: dict[str, Any] = {
        "tool_call_id": _text(call.id),
        "function_name": _text(call.name),
        "arguments": _value(call.arguments),
    }
    if call.error is not None:
        out["extra"] = {"error": _text(call.error)}
    return out


def _tool(tool: ToolSpec) -> dict[str, Any]:
    function = {
        "name": _text(tool.name),
        "description": _text(tool.description),
        "parameters": _value(tool.parameters),
    }
    return {"type": "function", "function": function}


def _text(text: str) -> str:
    """Return a text that every JSON reader takes: lone surrogates spelt out."""
    return storable_text(text) or ""


def _value(value: Any) -> Any:
    """Return a JSON value that every reader takes: numbers that are none, and lone surrogates, spelt out."""
    match value:
        case str():
            return _text(value)
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {_text(key): _value(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_value(item) for item in value]
        case _:
            return value
