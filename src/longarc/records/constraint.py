"""What a completion has to follow besides what was said: a JSON schema."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from longarc.errors import ContractError

Reasoning: TypeAlias = Literal["none", "open", "optional"]
"""Whether reasoning stands before the answer. open: the prompt opened it; optional: the model opens it, if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A JSON schema for the text of an answer.

    The answer is ``[reasoning] blanks JSON``, or ``[reasoning] blanks tool call`` where calls are possible. Reasoning
    and calls are free text; only the JSON follows the schema.
    """

    json_schema: str
    """The schema, as JSON."""
    reasoning: Reasoning = "none"
    """What may stand before the answer; it ends with ``</think>``."""
    allows_calls: bool = False
    """Whether the model may begin with ``<tool_call>`` instead of JSON."""
    tags_by_id: bool = False
    """Whether those tags are control ids alone; else text that spells one is one too."""

    def __post_init__(self) -> None:
        if self.reasoning not in get_args(Reasoning):
            raise ContractError(
                f"Constraint: reasoning={self.reasoning!r} has to be one of {get_args(Reasoning)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedSpan:
    """Tokens of a segment that were sampled under a constraint: one completion, or its beginning."""

    start: int
    """Position of the completion's first token."""
    stop: int
    """Position behind its last one."""
    constraint: Constraint
    stop_ids: tuple[int, ...]
    """Ids that may end it once the schema is satisfied."""
