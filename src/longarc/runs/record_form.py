"""The types of a trajectory in JSON (``record_json``), for files that come from outside.

What LongArc wrote itself is read without this: it costs time, and cannot be wrong.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from longarc.config.settings import problems_of
from longarc.errors import ContractError
from longarc.records.constraint import Reasoning

_Text = InstanceOf[str]
"""Any text, lone surrogates as well, which pydantic's own ``str`` refuses."""
_Count = Annotated[int, Field(ge=0)]
_Runs = list[_Count]
_Base64 = Annotated[
    str, Field(pattern=r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")
]
_SHOWN_PROBLEMS = 3


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _Call(_Form):
    id: _Text
    name: _Text
    arguments: dict[_Text, Any]
    error: _Text | None = None


class _Message(_Form):
    role: _Text
    content: _Text
    reasoning: _Text | None = None
    tool_calls: list[_Call] = []
    tool_call_id: _Text | None = None


class _Tool(_Form):
    name: _Text
    description: _Text
    parameters: dict[_Text, Any]


class _Turn(_Form):
    segment_order: _Count
    start: _Count
    num_sampled: _Count
    parent: _Count | None
    said: list[_Message]
    answer: _Message
    finish_reason: _Text
    elapsed_s: float
    tools: list[_Tool] = []


class _Constrained(_Form):
    start: _Count
    stop: _Count
    stop_ids: list[_Count]
    json_schema: _Text
    reasoning: Reasoning
    allows_calls: bool
    tags_by_id: bool


class _Segment(_Form):
    order: _Count
    kind: _Text
    agent_id: _Text
    parent_agent_id: _Text | None
    window: _Count
    parent: _Count | None
    token_ids: list[int]
    sampled_runs: _Runs
    trained_runs: _Runs
    logprobs: list[float]
    version_runs: list[Annotated[_Runs, Field(min_length=2, max_length=2)]]
    kept_ids: list[list[int]] | None = None
    constraints: list[_Constrained] = []
    routing: list[_Base64] | None = None


class _Trajectory(_Form):
    format: _Text
    id: _Text
    stage: _Text
    group_id: _Text
    task_id: _Text
    family: _Text
    outcome: _Text
    reward: float | None
    reward_parts: dict[_Text, float]
    num_turns: _Count
    difficulty: float
    started_at_s: float
    duration_s: float
    error: _Text | None
    info: dict[_Text, Any]
    messages: list[_Message]
    tools: list[_Tool]
    turns: list[_Turn]
    segments: list[_Segment]


def check_form(value: object) -> None:
    """Refuse what cannot be a trajectory in JSON.

    Raises:
        ContractError: a field is missing, unknown or of another type; the first of them are named.
    """
    try:
        trajectory = _Trajectory.model_validate(value)
    except ValidationError as error:
        said = problems_of(error).split("; ")
        more = f"; and {len(said) - _SHOWN_PROBLEMS} more" if len(said) > _SHOWN_PROBLEMS else ""
        raise ContractError(f"no trajectory: {'; '.join(said[:_SHOWN_PROBLEMS])}{more}") from error
    for position, turn in enumerate(trajectory.turns):
        if turn.parent is not None and turn.parent >= position:
            raise ContractError(
                f"no trajectory: turn {position} continues turn {turn.parent}, which does not come before it"
            )
    for segment in trajectory.segments:
        num_sampled = sum(segment.sampled_runs[1::2])
        counts = {
            "token_ids": (len(segment.token_ids), sum(segment.sampled_runs)),
            "trained_runs": (sum(segment.trained_runs), len(segment.token_ids)),
            "logprobs": (len(segment.logprobs), num_sampled),
            "version_runs": (sum(length for _, length in segment.version_runs), num_sampled),
        }
        for name, (found, expected) in counts.items():
            if found != expected:
                raise ContractError(
                    f"no trajectory: {name} of segment {segment.order} are {found} tokens, and sampled_runs say {expected}"
                )
