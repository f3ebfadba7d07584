"""A task: a problem statement plus what is needed to grade it."""

from collections.abc import Mapping
from dataclasses import dataclass

from longarc.records.message import Json, Message, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. Two tasks with one id are the same problem: the id is stable across runs."""

    id: str
    """``family/split/index``, or whatever the source finds stable."""
    family: str
    """Name of the task family, which also grades it."""
    split: str
    """train or test; a source never yields one problem in both."""
    messages: tuple[Message, ...]
    """The conversation that opens the rollout (system and user messages)."""
    tools: tuple[ToolSpec, ...] = ()
    difficulty: float = 0.0
    """Larger is harder; the unit is the family's own (hops, digits, constraints)."""
    data: Mapping[str, Json] | None = None
    """What the environment and the grader need (answers, file trees); never shown to the policy."""
