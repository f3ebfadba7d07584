"""A stored turn as its answer: for environments, for streams, and its seed."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from longarc.gateway.tree import Node
from longarc.gateway.turn_options import TurnOptions
from longarc.records.ports import AssistantTurn
from longarc.records.sampling import SampledTokens, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn as the doors see it: the parsed answer and the tokens behind it."""

    turn: AssistantTurn
    node: Node
    stop: str | None = None
    """The stop text that ended it, if one did."""


@dataclass(frozen=True, slots=True)
class MadeTurn:
    """A turn that is not recorded yet."""

    answer: Answer
    digest: "hashlib.blake2b"
    """Of all ids up to its end."""


def turn_seed(
    session: Sampling, options: TurnOptions, sampling: Sampling, serial: int
) -> int | None:
    """Return a seed of its own for each turn, or every turn of a session would repeat the same luck."""
    if options.seed is not None:
        return options.seed
    if options.sampling is not None or session.seed is None:
        return sampling.seed
    digest = hashlib.blake2b(f"{session.seed}/{serial}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def pieces_of(node: Node) -> Iterable[SampledTokens]:
    """Yield a stored completion again, one piece for each version that sampled a part of it."""
    start = 0
    for number, (version, length) in enumerate(node.version_runs, start=1):
        end = start + length
        yield SampledTokens(
            token_ids=tuple(node.sampled_ids[start:end]),
            logprobs=tuple(node.logprobs[start:end]),
            policy_version=version,
            finish_reason=node.finish_reason if number == len(node.version_runs) else None,
            kept_ids=node.kept_ids[start:end],
        )
        start = end


def turn_of(node: Node, *, num_prompt_tokens: int) -> AssistantTurn:
    """Return a turn as an environment sees it."""
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    if node.finish_reason == "length":
        finish_reason = "length"
    elif node.message.tool_calls:
        finish_reason = "tool_calls"
    return AssistantTurn(
        message=node.message,
        finish_reason=finish_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_sampled_tokens=len(node.sampled_ids),
    )
