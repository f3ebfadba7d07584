"""Which part of a conversation the policy is shown: decisions about messages and counts, without a policy.

A conversation is an opening (the task), then rounds: an answer of the policy with the results of its calls. A round
is never cut in two.

::

    opening | answer 1, results 1 | answer 2, results 2 | ... | answer n, results n
    folded:   answer 1, "omitted"   answer 2, "omitted"   ...   the last k with their results
    summed:   (gone)                (gone)                      the last k behind the summary

Source: GLM-5 report, 4.2.4 (folding, discarding); CompactionRL, section 3 (summaries).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from longarc.records.message import Message, Role

FOLDED: Final = "Tool result is omitted to save tokens."
"""What stands in the place of a folded result; the report's own words."""


def rounds(messages: Sequence[Message], *, num_opening: int) -> list[tuple[Message, ...]]:
    """Return the rounds of a conversation.

    Args:
        messages: the conversation.
        num_opening: messages before the first answer [messages].
    """
    starts = [i for i in range(num_opening, len(messages)) if messages[i].role is Role.ASSISTANT]
    return [tuple(messages[start:end]) for start, end in pairwise([*starts, len(messages)])]


def folded(
    messages: Sequence[Message], *, num_opening: int, keep_recent: int
) -> tuple[Message, ...]:
    """Return a conversation in which only the newest rounds show their results.

    Of n rounds the results of the first n - k are folded; answers stay, with reasoning and calls.

    Args:
        messages: the conversation.
        num_opening: messages before the first answer [messages].
        keep_recent: k.
    """
    every = rounds(messages, num_opening=num_opening)
    num_folded = max(len(every) - keep_recent, 0)
    shown = list(messages[:num_opening])
    for number, one in enumerate(every):
        is_folded = number < num_folded
        shown += [
            replace(message, content=FOLDED) if is_folded and message.role is Role.TOOL else message
            for message in one
        ]
    return tuple(shown)


def must_discard(num_tokens: int, *, above_tokens: int) -> bool:
    """Say whether a conversation of ``num_tokens`` is too long to go on with."""
    return num_tokens > above_tokens


def must_summarise(
    num_unused_tokens: int, *, below_tokens: int, num_compactions: int, max_compactions: int
) -> bool:
    """Say whether it is time for a summary, and one is still allowed."""
    return num_unused_tokens < below_tokens and num_compactions < max_compactions


def resumed(
    opening: Sequence[Message], resumption: str, recent: Sequence[Sequence[Message]]
) -> tuple[Message, ...]:
    """Return the conversation that goes on from a summary.

    The summary joins the task's last user message, because not every chat format has two in a row.

    Args:
        opening: the task.
        resumption: the summary as the policy is to read it.
        recent: newest rounds, which stay as they are.
    """
    kept = [message for one in recent for message in one]
    if opening and opening[-1].role is Role.USER:
        task = opening[-1]
        joined = replace(task, content=f"{task.content}\n\n{resumption}")
        return (*opening[:-1], joined, *kept)
    return (*opening, Message(role=Role.USER, content=resumption), *kept)
