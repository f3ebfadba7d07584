"""ATIF documents as trajectories: ours come back equal, those of other programs as far as they tell.

A foreign document becomes its conversation, one trajectory for it and one for each document in it. It has segments
where every step has prompt ids, completion ids and log-probabilities; steps whose prompt continues what stands
before share one. Else it has none: its conversation can be imitated, rendered by a chat format, and that is all.

``info["atif"]`` says that it was not sampled here, what the document said beside its steps, and which messages
of its agent are not to be imitated, because they were copied from elsewhere or no model wrote them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from longarc.errors import ContractError, boundary
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.segment import MAIN_AGENT, NOT_SAMPLED, Segment
from longarc.records.trajectory import Trajectory
from longarc.runs.atif_document import (
    ContentPart,
    Document,
    StepPart,
    ToolCallPart,
    check_version,
    read_document,
)
from longarc.runs.atif_record import record_from_extra

STAGE: Final = "import"
"""What the ledger calls trajectories of other programs."""
INFO_KEY: Final = "atif"
"""Where ``info`` tells of the document that a trajectory was read from."""
_OLDEST_WEIGHTS: Final = 0
"""Version of tokens whose weights nobody told."""


def trajectories_from_atif(data: object, *, name: str) -> tuple[Trajectory, ...]:
    """Return the trajectories of an ATIF document, v1.0 to v1.8: its own, then those in it.

    Args:
        data: the JSON of the root.
        name: the id of one that has none of its own, such as its file name.

    Raises:
        ContractError: it is no such document, holds what cannot be trained on (pictures, sounds), or was edited
            since it was exported from here.
    """
    with boundary(ContractError, f"ATIF document {name!r}"):
        check_version(data, name=name)
        assert isinstance(data, Mapping)
        ours = record_from_extra(data, name=name)
        if ours is not None:
            return (ours,)
        document = read_document(data, name=name)
        return tuple(_foreign(document, trajectory_id=document.trajectory_id or name))


def untrained_messages(trajectory: Trajectory) -> frozenset[int] | None:
    """Return the positions of the agent's messages that are not its own; None where no foreign document told."""
    told = trajectory.info.get(INFO_KEY)
    positions = told.get("untrained") if isinstance(told, Mapping) else None
    if not isinstance(positions, Sequence) or isinstance(positions, str):
        return None
    return frozenset(position for position in positions if isinstance(position, int))


def _foreign(
    document: Document,
    *,
    trajectory_id: str,
    agent_id: str = MAIN_AGENT,
    parent_agent_id: str | None = None,
    group_id: str | None = None,
) -> Iterator[Trajectory]:
    messages, untrained = _conversation(document.steps)
    started_at_s, duration_s = _times(document.steps)
    yield Trajectory(
        id=trajectory_id,
        stage=STAGE,
        group_id=group_id or trajectory_id,
        task_id=trajectory_id,
        family=document.agent.name,
        outcome=Outcome.COMPLETED,
        reward=None,
        reward_parts={},
        segments=_segments(document.steps, agent_id=agent_id, parent_agent_id=parent_agent_id),
        messages=tuple(messages),
        tools=_tools(document.agent.tool_definitions or ()),
        num_turns=sum(step.was_sampled for step in document.steps),
        difficulty=0.0,
        started_at_s=started_at_s,
        duration_s=duration_s,
        info={INFO_KEY: _beside_steps(document, untrained)},
    )
    for inner in document.subagent_trajectories or ():
        inner_id = f"{trajectory_id}/{inner.trajectory_id}"
        yield from _foreign(
            inner,
            trajectory_id=inner_id,
            agent_id=inner_id,
            parent_agent_id=agent_id,
            group_id=group_id or trajectory_id,
        )


def _beside_steps(document: Document, untrained: Sequence[int]) -> dict[str, Any]:
    """Return what the document says beside steps, tools and the documents in it."""
    told = document.model_dump(
        exclude={"trajectory_id", "steps", "subagent_trajectories", "agent"}, exclude_none=True
    )
    told["agent"] = document.agent.model_dump(exclude={"tool_definitions"}, exclude_none=True)
    told["untrained"] = list(untrained)
    return told


def _conversation(steps: Sequence[StepPart]) -> tuple[list[Message], list[int]]:
    """Return the messages of all steps, and the positions of the agent's that no model wrote here."""
    messages: list[Message] = []
    untrained: list[int] = []
    for step in steps:
        results = step.observation.results if step.observation else []
        if step.source == "agent":
            if not step.was_sampled:
                untrained.append(len(messages))
            messages.append(
                Message(
                    role=Role.ASSISTANT,
                    content=_text(step.message),
                    reasoning=step.reasoning_content,
                    tool_calls=tuple(map(_call, step.tool_calls or ())),
                )
            )
        elif step.message or not results:
            messages.append(Message(role=Role(step.source), content=_text(step.message)))
        messages += [
            _result(_text(result.content), result.source_call_id)
            for result in results
            if result.content is not None
        ]
    return messages, untrained


def _result(content: str, call_id: str | None) -> Message:
    """Return a result: of a call as a tool's message, else as the user's, who alone can say it to such an agent."""
    role = Role.USER if call_id is None else Role.TOOL
    return Message(role=role, content=content, tool_call_id=call_id)


def _text(content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text or "" for part in content)


def _call(call: ToolCallPart) -> ToolCall:
    return ToolCall(id=call.tool_call_id, name=call.function_name, arguments=call.arguments)


def _tools(definitions: Sequence[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Return tools: in the form of OpenAI's function calling, or bare as Anthropic has them."""
    tools = []
    for definition in definitions:
        function = definition.get("function", definition)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise ContractError(f"agent.tool_definitions has one without a name: {definition!r}")
        parameters = function.get("parameters") or function.get("input_schema")
        tools.append(
            ToolSpec(
                name=name,
                description=str(function.get("description") or ""),
                parameters=parameters or {"type": "object", "properties": {}},
            )
        )
    return tuple(tools)


def _times(steps: Sequence[StepPart]) -> tuple[float, float]:
    """Return start [seconds since the epoch] and duration [seconds]; zeros where no step has a timestamp."""
    stamps = []
    for step in steps:
        if step.timestamp is None:
            continue
        with boundary(ContractError, f"step {step.step_id} has timestamp {step.timestamp!r}"):
            stamps.append(datetime.fromisoformat(step.timestamp).timestamp())
    return (min(stamps), max(stamps) - min(stamps)) if stamps else (0.0, 0.0)


@dataclass(slots=True)
class _Growing:
    """A segment while steps are added to it."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def is_continued_by(self, prompt: Sequence[int]) -> bool:
        return list(prompt[: len(self.ids)]) == self.ids

    def grow(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Add context, or what was sampled with its log-probabilities."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


def _segments(
    steps: Sequence[StepPart], *, agent_id: str, parent_agent_id: str | None
) -> tuple[Segment, ...]:
    """Return the segments of one agent; none where a sampled step lacks what training needs."""
    grown: list[_Growing] = []
    for step in steps:
        if not step.was_sampled:
            continue
        metrics = step.metrics
        if (
            metrics is None
            or metrics.prompt_token_ids is None
            or metrics.completion_token_ids is None
            or metrics.logprobs is None
            or (step.llm_call_count or 1) > 1
        ):
            return ()
        prompt = metrics.prompt_token_ids
        if not grown or not grown[-1].is_continued_by(prompt):
            grown.append(_Growing())
        current = grown[-1]
        current.grow(prompt[len(current.ids) :], None)
        current.grow(metrics.completion_token_ids, metrics.logprobs)
    return tuple(
        Segment(
            token_ids=tuple(one.ids),
            is_sampled=tuple(one.sampled),
            train_mask=tuple(one.sampled),
            behaviour_logprobs=tuple(one.logprobs),
            policy_versions=tuple(_OLDEST_WEIGHTS if s else NOT_SAMPLED for s in one.sampled),
            order=order,
            parent=order - 1 if order else None,
            agent_id=agent_id,
            parent_agent_id=parent_agent_id,
            window=order,
        )
        for order, one in enumerate(grown)
    )
