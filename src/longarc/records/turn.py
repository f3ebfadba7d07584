"""One turn of a rollout whose agent owns its context: what was said, what was answered, and where its tokens are."""

from collections.abc import Sequence
from dataclasses import dataclass

from longarc.records.message import Message, ToolSpec
from longarc.records.sampling import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request and its answer."""

    segment_order: int
    """Order of the segment that trains the answer, or would if it were trained."""
    start: int
    """Position of the first sampled token in that segment; what stands before it is the prompt."""
    num_sampled: int
    """Sampled tokens."""
    parent: int | None
    """Position among the trajectory's turns of the one that this continues; None where it continues none."""
    said: tuple[Message, ...]
    """The messages since that turn; the whole conversation where there is none."""
    answer: Message
    finish_reason: FinishReason
    elapsed_s: float
    """Age of the session when it was answered [seconds]."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools of the prompt of a turn that continues none; what continues one has that one's."""


def conversation(turns: Sequence[Turn], position: int) -> tuple[Message, ...]:
    """Return the whole conversation up to and including the answer of one turn."""
    path = lineage(turns, position)
    return tuple(message for at in path for message in (*turns[at].said, turns[at].answer))


def lineage(turns: Sequence[Turn], position: int) -> list[int]:
    """Return the positions of the turns that one continues, the first of them first, and its own."""
    path: list[int] = []
    at: int | None = position
    while at is not None:
        path.append(at)
        at = turns[at].parent
    return path[::-1]
