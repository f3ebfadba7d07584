"""ATIF documents as trajectories: ours come back equal, those of other programs as far as they tell.

A foreign document becomes its conversation, and segments where each step has prompt ids, completion ids
and log-probabilities: steps whose prompt continues what stands before share a segment. Sub-agents follow
with segments of their own. What cannot be known stays out: without all three there are no segments, and
steps of several model calls, or copied from elsewhere, have none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from longarc.errors import ContractError, boundary
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.segment import MAIN_AGENT, NOT_SAMPLED, Segment
from longarc.records.trajectory import Trajectory
from longarc.runs.record_json import trajectory_from_json

_NEWEST_MINOR = 8
STAGE = "import"
"""What the ledger calls trajectories of other programs."""


def trajectory_from_atif(document: Mapping[str, Any], *, name: str) -> Trajectory:
    """Return the trajectory of an ATIF document, v1.0 to v1.8.

    Args:
        document: the JSON of the root.
        name: what it is called where it has no id of its own, such as its file name.

    Raises:
        ContractError: it is no such document, or holds what cannot be trained on (pictures, sounds).
    """
    with boundary(ContractError, f"ATIF document {name!r}"):
        _check_version(document, name)
        ours = document.get("extra", {}) or {}
        if "longarc" in ours:
            return trajectory_from_json(ours["longarc"])
        trajectory_id = str(document.get("trajectory_id") or document.get("session_id") or name)
        segments = _Segments()
        segments.add(document, agent_id=MAIN_AGENT, parent_agent_id=None)
        return Trajectory(
            id=trajectory_id,
            stage=STAGE,
            group_id=trajectory_id,
            task_id=trajectory_id,
            family=str(document["agent"]["name"]),
            outcome=Outcome.COMPLETED,
            reward=None,
            reward_parts={},
            segments=segments.finished(),
            messages=_conversation(document),
            tools=_tools(document["agent"].get("tool_definitions") or ()),
            num_turns=sum(step["source"] == "agent" for step in document["steps"]),
            difficulty=0.0,
            **_times(document["steps"]),
        )


def _check_version(document: Mapping[str, Any], name: str) -> None:
    stated = document.get("schema_version")
    minor = str(stated).removeprefix("ATIF-v1.")
    is_known = str(stated).startswith("ATIF-v1.") and minor.isascii() and minor.isdigit()
    if not is_known or int(minor) > _NEWEST_MINOR:
        raise ContractError(
            f"{name!r} has schema_version {stated!r}; ATIF-v1.0 to ATIF-v1.{_NEWEST_MINOR} can be read"
        )


def _conversation(document: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages of all steps."""
    messages: list[Message] = []
    for step in document["steps"]:
        number = step["step_id"]
        results = (step.get("observation") or {}).get("results", ())
        if step["source"] == "agent":
            messages.append(
                Message(
                    role=Role.ASSISTANT,
                    content=_text(step["message"], number),
                    reasoning=step.get("reasoning_content"),
                    tool_calls=tuple(_call(call) for call in step.get("tool_calls") or ()),
                )
            )
        elif step["message"] or not results:
            messages.append(
                Message(role=Role(step["source"]), content=_text(step["message"], number))
            )
        messages += [
            Message(
                role=Role.TOOL,
                content=_text(result["content"], number),
                tool_call_id=result.get("source_call_id"),
            )
            for result in results
            if result.get("content") is not None
        ]
    return tuple(messages)


def _text(content: str | Sequence[Mapping[str, Any]], step_id: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part["type"] != "text":
            raise ContractError(
                f"step {step_id} holds a part of type {part['type']!r}; only text can be read"
            )
    return "".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> ToolCall:
    return ToolCall(
        id=call["tool_call_id"], name=call["function_name"], arguments=dict(call["arguments"])
    )


def _tools(definitions: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    functions = [definition.get("function", definition) for definition in definitions]
    return tuple(
        ToolSpec(
            name=function["name"],
            description=function.get("description") or "",
            parameters=function.get("parameters")
            or function.get("input_schema")
            or {"type": "object", "properties": {}},
        )
        for function in functions
    )


def _times(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    stamps = [
        datetime.fromisoformat(str(step["timestamp"]).replace("Z", "+00:00")).timestamp()
        for step in steps
        if step.get("timestamp")
    ]
    if not stamps:
        return {"started_at_s": 0.0, "duration_s": 0.0}
    return {"started_at_s": min(stamps), "duration_s": max(stamps) - min(stamps)}


@dataclass(slots=True)
class _Growing:
    """A segment while steps are added to it."""

    agent_id: str
    parent_agent_id: str | None
    window: int
    parent: int | None
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def grow(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Add context, or what was sampled with its log-probabilities."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


class _Segments:
    """The segments of a document and of those in it."""

    def __init__(self) -> None:
        self._all: list[_Growing] = []
        self._is_complete = True

    def add(
        self, document: Mapping[str, Any], *, agent_id: str, parent_agent_id: str | None
    ) -> None:
        """Add the tokens of one agent, and then of its sub-agents."""
        spawned_from = len(self._all) - 1 if self._all else None
        current: _Growing | None = None
        for step in document["steps"]:
            if step["source"] != "agent" or step.get("is_copied_context"):
                continue
            if step.get("llm_call_count") == 0:
                continue
            metrics = step.get("metrics") or {}
            parts = [
                metrics.get(n) for n in ("prompt_token_ids", "completion_token_ids", "logprobs")
            ]
            if any(part is None for part in parts) or (step.get("llm_call_count") or 1) > 1:
                self._is_complete = False
                continue
            prompt, ids, logprobs = parts
            if len(ids) != len(logprobs):
                raise ContractError(
                    f"step {step['step_id']} has {len(ids)} completion ids with {len(logprobs)} log-probabilities"
                )
            if current is None or prompt[: len(current.ids)] != current.ids:
                grown_from = spawned_from if current is None else len(self._all) - 1
                window = 0 if current is None else current.window + 1
                current = _Growing(agent_id, parent_agent_id, window, grown_from)
                self._all.append(current)
            current.grow(prompt[len(current.ids) :], None)
            current.grow(ids, logprobs)
        for number, inner in enumerate(document.get("subagent_trajectories") or ()):
            name = str(inner.get("trajectory_id") or f"{agent_id}/{number}")
            self.add(inner, agent_id=name, parent_agent_id=agent_id)

    def finished(self) -> tuple[Segment, ...]:
        """Return the segments, or none where a step lacks what training needs."""
        if not self._is_complete:
            return ()
        return tuple(
            Segment(
                token_ids=tuple(one.ids),
                is_sampled=tuple(one.sampled),
                train_mask=tuple(one.sampled),
                behaviour_logprobs=tuple(one.logprobs),
                # Whose weights they were is not told: the oldest there are.
                policy_versions=tuple(0 if s else NOT_SAMPLED for s in one.sampled),
                order=order,
                parent=one.parent,
                agent_id=one.agent_id,
                parent_agent_id=one.parent_agent_id,
                window=one.window,
            )
            for order, one in enumerate(self._all)
        )
