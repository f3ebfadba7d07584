"""Trajectories as ATIF v1.8 documents, the Agent Trajectory Interchange Format that Harbor reads and writes.

One document is one trajectory. The main agent's turns are its steps; every other agent, and every side
request, is an embedded sub-agent trajectory that the step before it refers to. An agent step has the
exact prompt and completion ids, the log-probabilities and the versions of its turn. ``extra.longarc``
holds the whole record, so that a document of ours comes back equal (``atif_import``).

Source: Harbor RFC 0001, "Agent Trajectory Interchange Format", v1.8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from typing import Any, Final

from longarc.errors import ContractError
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.segment import Segment, SegmentKind
from longarc.records.trajectory import Trajectory
from longarc.runs.record_json import trajectory_to_json

ATIF_VERSION: Final = "ATIF-v1.8"


@dataclass(frozen=True, slots=True)
class _Completion:
    """The tokens of one agent step."""

    segment: Segment
    start: int
    end: int
    seconds: float | None
    """After the trajectory's start [seconds]; None where nobody knows."""


def trajectory_to_atif(trajectory: Trajectory, *, prompt_ids: bool = True) -> dict[str, Any]:
    """Return a trajectory as an ATIF document, which is JSON.

    Args:
        trajectory: of a white-box environment or of a client that owns its context.
        prompt_ids: whether each agent step repeats its whole prompt, as the format has it; without, a long
            trajectory takes a fraction of the room, and the prompts are still in ``extra.longarc``.

    Raises:
        ContractError: it has no conversation, and the format wants at least one step.
    """
    documents = _Documents(trajectory, prompt_ids=prompt_ids)
    if trajectory.turns:
        documents.add_turns()
    else:
        documents.add_messages()
    return documents.finished()


@dataclass(slots=True)
class _Document:
    """One agent's steps."""

    agent_id: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    seen: set[tuple[Role, str]] = field(default_factory=set)
    notes: str | None = None
    kind: SegmentKind = SegmentKind.EXEC

    def say(self, message: Message, *, is_repeated: bool) -> None:
        """Add a message that was not sampled here."""
        is_copied = is_repeated and (message.role, message.content) in self.seen
        self.seen.add((message.role, message.content))
        if message.role is Role.TOOL:
            self._observe(message)
            return
        source = "agent" if message.role is Role.ASSISTANT else message.role.value
        step: dict[str, Any] = {"source": source, "message": message.content}
        if message.role is Role.ASSISTANT:
            # It was sampled before, or by nobody: nothing to learn from here.
            step |= _spoken(message)
            is_copied = True
        if is_copied:
            step["is_copied_context"] = True
        self._add(step)

    def answer(
        self, message: Message, completion: _Completion | None, *, prompt_ids: bool, start_s: float
    ) -> None:
        """Add what the policy sampled."""
        self.seen.add((message.role, message.content))
        step: dict[str, Any] = {"source": "agent", "message": message.content, **_spoken(message)}
        step["llm_call_count"] = 1
        if completion is not None:
            step["metrics"] = _metrics(completion, prompt_ids=prompt_ids)
            if completion.seconds is not None:
                at = datetime.fromtimestamp(start_s + completion.seconds, UTC)
                step["timestamp"] = at.isoformat()
        self._add(step)

    def refer(self, trajectory_id: str) -> None:
        """Note that the newest agent step started a sub-agent."""
        for step in reversed(self.steps):
            if step["source"] == "agent":
                ref = {"subagent_trajectory_ref": [{"trajectory_id": trajectory_id}]}
                step.setdefault("observation", {"results": []})["results"].append(ref)
                return

    def _observe(self, message: Message) -> None:
        for step in reversed(self.steps):
            ids = [call["tool_call_id"] for call in step.get("tool_calls", ())]
            if message.tool_call_id in ids:
                results = step.setdefault("observation", {"results": []})["results"]
                results.append({"source_call_id": message.tool_call_id, "content": message.content})
                return
        result = {"content": message.content}
        self._add({"source": "system", "message": "", "observation": {"results": [result]}})

    def _add(self, step: dict[str, Any]) -> None:
        self.steps.append({"step_id": len(self.steps) + 1, **step})


class _Documents:
    """All agents of one trajectory."""

    def __init__(self, trajectory: Trajectory, *, prompt_ids: bool) -> None:
        self._trajectory = trajectory
        self._prompt_ids = prompt_ids
        self._main: _Document | None = None
        self._others: dict[str, _Document] = {}

    def add_turns(self) -> None:
        """Add what a client that owns its context said and got."""
        trajectory = self._trajectory
        segments = {segment.order: segment for segment in trajectory.segments}
        for turn in trajectory.turns:
            segment = segments[turn.segment_order]
            document = self._document(segment)
            # A conversation that continues no turn repeats what its agent said and saw before.
            for message in turn.said:
                document.say(message, is_repeated=turn.parent is None)
            end = turn.start + turn.num_sampled
            self._answer(
                document, turn.answer, _Completion(segment, turn.start, end, turn.elapsed_s)
            )

    def add_messages(self) -> None:
        """Add the conversation of a white-box environment, with the tokens where they can be told apart."""
        document = self._main = _Document("main")
        messages = self._trajectory.messages
        answers = [m for m in messages if m.role is Role.ASSISTANT]
        completions = list(_trained_runs(self._trajectory.segments))
        if len(completions) != len(answers):
            document.notes = (
                f"{len(completions)} completions stand against {len(answers)} messages of the agent, so steps have "
                f"no token ids; extra.longarc.segments has them all"
            )
        known = iter(completions if document.notes is None else ())
        for message in messages:
            if message.role is Role.ASSISTANT:
                self._answer(document, message, next(known, None))
            else:
                document.say(message, is_repeated=False)

    def finished(self) -> dict[str, Any]:
        """Return the main agent's document with all others in it."""
        trajectory, main = self._trajectory, self._main
        if main is None or not main.steps:
            raise ContractError(
                f"trajectory {trajectory.id!r} has no conversation of a main agent, and ATIF wants at least one "
                f"step; export it as JSON lines"
            )
        out = self._head(main, trajectory.id)
        out["session_id"] = trajectory.id
        if trajectory.tools:
            out["agent"]["tool_definitions"] = [_tool(tool) for tool in trajectory.tools]
        if main.notes is not None:
            out["notes"] = main.notes
        documents = [main, *self._others.values()]
        steps = [step for document in documents for step in document.steps]
        metrics = [step["metrics"] for step in steps if "metrics" in step]
        out["final_metrics"] = {
            "total_prompt_tokens": sum(m["prompt_tokens"] for m in metrics),
            "total_completion_tokens": sum(m["completion_tokens"] for m in metrics),
            "total_steps": len(main.steps),
            "extra": {
                "outcome": trajectory.outcome.value,
                "reward": trajectory.reward,
                "reward_parts": dict(trajectory.reward_parts),
            },
        }
        if self._others:
            out["subagent_trajectories"] = [
                self._head(document, trajectory_id)
                for trajectory_id, document in self._others.items()
            ]
        out["extra"] = {"longarc": trajectory_to_json(trajectory)}
        return out

    def _head(self, document: _Document, trajectory_id: str) -> dict[str, Any]:
        return {
            "schema_version": ATIF_VERSION,
            "trajectory_id": trajectory_id,
            "agent": {
                "name": document.agent_id,
                "version": version("longarc"),
                "extra": {"kind": document.kind.value},
            },
            "steps": document.steps,
        }

    def _document(self, segment: Segment) -> _Document:
        is_side = segment.kind is SegmentKind.SIDE
        if segment.parent_agent_id is None and not is_side:
            if self._main is None:
                self._main = _Document(segment.agent_id)
            return self._main
        name = f"side-{segment.order}" if is_side else segment.agent_id
        trajectory_id = f"{self._trajectory.id}#{name}"
        if trajectory_id not in self._others:
            kind = SegmentKind.SIDE if is_side else SegmentKind.EXEC
            self._others[trajectory_id] = _Document(segment.agent_id, kind=kind)
            above = self._others.get(f"{self._trajectory.id}#{segment.parent_agent_id}", self._main)
            if above is not None and not is_side:
                above.refer(trajectory_id)
        return self._others[trajectory_id]

    def _answer(
        self, document: _Document, message: Message, completion: _Completion | None
    ) -> None:
        document.answer(
            message,
            completion,
            prompt_ids=self._prompt_ids,
            start_s=self._trajectory.started_at_s,
        )


def _trained_runs(segments: Sequence[Segment]) -> Iterator[_Completion]:
    """Yield the completions of segments: between two of them stands at least the token that opens the next."""
    for segment in segments:
        position = 0
        for (_, is_own), run in groupby(zip(segment.is_sampled, segment.train_mask, strict=True)):
            length = len(list(run))
            if is_own:
                yield _Completion(segment, position, position + length, None)
            position += length


def _spoken(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [_call(call) for call in message.tool_calls]
    return out


def _call(call: ToolCall) -> dict[str, Any]:
    out: dict[str, Any] = {
        "tool_call_id": call.id,
        "function_name": call.name,
        "arguments": dict(call.arguments),
    }
    if call.error is not None:
        out["extra"] = {"error": call.error}
    return out


def _tool(tool: ToolSpec) -> dict[str, Any]:
    parameters: Mapping[str, Any] = tool.parameters
    function = {"name": tool.name, "description": tool.description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def _metrics(completion: _Completion, *, prompt_ids: bool) -> dict[str, Any]:
    segment, start, end = completion.segment, completion.start, completion.end
    versions = segment.policy_versions[start:end]
    out: dict[str, Any] = {
        "prompt_tokens": start,
        "completion_tokens": end - start,
        "completion_token_ids": list(segment.token_ids[start:end]),
        "logprobs": list(segment.behaviour_logprobs[start:end]),
        "extra": {
            "policy_versions": [[v, len(list(run))] for v, run in groupby(versions)],
            "segment": segment.order,
            "window": segment.window,
            "kind": segment.kind.value,
        },
    }
    if prompt_ids:
        out["prompt_token_ids"] = list(segment.token_ids[:start])
    return out
