"""A segment: the unit of training."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import compress
from operator import gt

from longarc.errors import ContractError
from longarc.records.constraint import ConstrainedSpan

NOT_SAMPLED = -1
"""Policy version of a token that no policy sampled."""
MAIN_AGENT = "main"
"""Name of the agent that a session begins with, unless its client has one for it."""


class SegmentKind(StrEnum):
    """What a segment is part of."""

    EXEC = "exec"
    """The agent at work."""
    SUMMARY = "summary"
    """A compaction that the policy wrote itself."""
    SIDE = "side"
    """Requests beside the work (titles, probes); never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A contiguous token sequence whose prefix the engine saw exactly as stored.

    A trajectory whose context was rewritten (compaction, discarded tool output) holds several
    segments; one that only ever appended holds one. All per-token fields have one length L.
    """

    token_ids: tuple[int, ...]
    """Prompt, sampled and observed tokens in the order the engine saw them. Length L."""
    is_sampled: tuple[bool, ...]
    """True where the policy sampled the token. Length L."""
    train_mask: tuple[bool, ...]
    """True where the token is trained on: sampled, and not trained in an earlier branch. Length L."""
    behaviour_logprobs: tuple[float, ...]
    """log-probability [nats] under the behaviour policy; 0.0 where not sampled. Length L."""
    policy_versions: tuple[int, ...]
    """Weight version [optimizer steps] that sampled each token; NOT_SAMPLED elsewhere. Length L."""
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """Of each sampled token, the ids it was drawn from, ascending, where top-k, top-p or min-p left some out; ()
    elsewhere. Length L; None where no token of the segment has any."""
    constraints: tuple[ConstrainedSpan, ...] = ()
    """Where tokens were sampled under a constraint, in order. One without kept ids was drawn from all that the
    constraint allowed, which follows from the tokens before it in its span."""
    routing: tuple[bytes, ...] | None = None
    """What each token was routed to, in the bytes of ``longarc.models.routed_rows``, by the pass that drew the token
    behind it; empty for the last one. Length L; None where nobody asked."""
    kind: SegmentKind = SegmentKind.EXEC
    order: int = 0
    """Position of this segment in its trajectory, by time."""
    parent: int | None = None
    """Order of the segment this one grew out of (edit, compaction, sub-agent); None for the first."""
    agent_id: str = MAIN_AGENT
    """The harness's own name for the agent that spoke."""
    parent_agent_id: str | None = None
    """The agent that started this one; None for the main one."""
    window: int = 0
    """Number of the agent's context window; it grows with each compaction."""

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "is_sampled": len(self.is_sampled),
            "train_mask": len(self.train_mask),
            "behaviour_logprobs": len(self.behaviour_logprobs),
            "policy_versions": len(self.policy_versions),
        }
        if self.kept_ids is not None:
            lengths["kept_ids"] = len(self.kept_ids)
        if self.routing is not None:
            lengths["routing"] = len(self.routing)
        if len(set(lengths.values())) != 1:
            raise ContractError(f"Segment fields must have one length, got {lengths}")
        ends = [0, *(end for span in self.constraints for end in (span.start, span.stop))]
        if sorted(ends) != ends or ends[-1] > len(self.token_ids):
            raise ContractError(
                f"Segment of {len(self.token_ids)} tokens has constraints that overlap or go beyond it: {ends[1:]}"
            )
        if any(map(gt, self.train_mask, self.is_sampled)):
            raise ContractError("Segment trains on a token that the policy did not sample")
        for token_id, kept in zip(self.token_ids, self.kept_ids or (), strict=False):
            if kept and token_id not in kept:
                raise ContractError(
                    f"Segment has token {token_id}, which is not among the {len(kept)} ids it was drawn from"
                )

    def lag(self, *, trainer_version: int) -> int:
        """Staleness [optimizer steps] of the oldest sampled token; 0 means on-policy."""
        sampled = compress(self.policy_versions, self.is_sampled)
        return trainer_version - min(sampled, default=trainer_version)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that carry a gradient [tokens]."""
        return sum(self.train_mask)
