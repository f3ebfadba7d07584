"""What a policy answered, read strictly: graders compare the whole answer, never search in it.

A grader that looks for the right word inside the answer pays for listing every word.
"""

import re

from longarc.records.message import Role
from longarc.records.outcome import Outcome
from longarc.records.trajectory import EpisodeResult, Reward

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?")


def final_answer(episode: EpisodeResult) -> str | None:
    """Return the visible text of the last assistant message, stripped.

    None where the episode did not end with an answer: it was cut, ran out of turns, or the last
    message still calls a tool. Thinking is not part of the answer.
    """
    if episode.outcome is not Outcome.COMPLETED or not episode.messages:
        return None
    last = episode.messages[-1]
    if last.role is not Role.ASSISTANT or last.tool_calls:
        return None
    return last.content.strip()


def last_number(answer: str | None) -> str | None:
    """Return the last number in an answer as it was written, without separators of thousands; None where there is none.

    For models that answer in sentences. Which number is meant does not depend on what else is said, and naming
    several pays no more than naming the last.
    """
    numbers = _NUMBER.findall(answer or "")
    return numbers[-1].replace(",", "") if numbers else None


def is_labelled(answer: str | None, *, label: str, value: str) -> bool:
    """True where the answer is exactly ``value``, or ``value`` behind ``label`` and ``:`` or ``=``."""
    if answer is None:
        return False
    pattern = rf"(?:{re.escape(label)} ?[:=] ?)?{re.escape(value)}"
    return re.fullmatch(pattern, answer) is not None


def success(is_right: bool, **parts: float) -> Reward:
    """The reward of a task that is either done or not: 1 or 0."""
    value = 1.0 if is_right else 0.0
    return Reward(value=value, parts={"success": value, **parts})
