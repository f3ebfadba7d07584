"""How a rollout ended (``Outcome``) and what became of its data (``Disposition``).

The two are kept apart because they answer different questions: an outcome says whose doing the
ending was, a disposition says whether a gradient, an evaluation or nothing came of it.
"""

from enum import StrEnum
from typing import Final


class OutcomeFamily(StrEnum):
    """Whose doing an ending was; the family decides what happens to the sample."""

    POLICY = "policy"
    """The policy's own doing: graded and trained."""
    ENVIRONMENT = "environment"
    """Noise of the environment: excluded from baseline and loss."""
    CONTROL = "control"
    """LongArc ended it: excluded, the task is admitted again."""


class Outcome(StrEnum):
    """How one rollout ended."""

    COMPLETED = "completed"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TURNS = "truncated_turns"
    TIMED_OUT = "timed_out"
    INVALID_FORMAT = "invalid_format"

    ENV_CRASHED = "env_crashed"
    SANDBOX_LOST = "sandbox_lost"
    GRADER_FAILED = "grader_failed"
    ENGINE_LOST = "engine_lost"
    ENGINE_FAULT = "engine_fault"

    CANCELLED_STALE = "cancelled_stale"
    CANCELLED_SHUTDOWN = "cancelled_shutdown"

    @property
    def family(self) -> OutcomeFamily:
        """Whose doing this ending was."""
        return _FAMILIES[self]

    @property
    def is_trainable(self) -> bool:
        """True where the ending is the policy's own doing, so that its reward means something."""
        return self.family is OutcomeFamily.POLICY


_FAMILIES: Final = {
    Outcome.COMPLETED: OutcomeFamily.POLICY,
    Outcome.TRUNCATED_TOKENS: OutcomeFamily.POLICY,
    Outcome.TRUNCATED_TURNS: OutcomeFamily.POLICY,
    Outcome.TIMED_OUT: OutcomeFamily.POLICY,
    Outcome.INVALID_FORMAT: OutcomeFamily.POLICY,
    Outcome.ENV_CRASHED: OutcomeFamily.ENVIRONMENT,
    Outcome.SANDBOX_LOST: OutcomeFamily.ENVIRONMENT,
    Outcome.GRADER_FAILED: OutcomeFamily.ENVIRONMENT,
    Outcome.ENGINE_LOST: OutcomeFamily.ENVIRONMENT,
    Outcome.ENGINE_FAULT: OutcomeFamily.ENVIRONMENT,
    Outcome.CANCELLED_STALE: OutcomeFamily.CONTROL,
    Outcome.CANCELLED_SHUTDOWN: OutcomeFamily.CONTROL,
}


class Disposition(StrEnum):
    """What became of a trajectory's data; every trajectory ends with exactly one."""

    TRAINED = "trained"
    """Used by at least one step; each use is a ledger row with step and multiplicity."""
    EVALUATED = "evaluated"
    SERVED = "served"
    COLLECTED = "collected"
    """Imported: it was sampled elsewhere, or by another run."""
    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    GROUP_DROPPED = "group_dropped"
    ENVIRONMENT_FAULT = "environment_fault"
    FILTERED = "filtered"
    """Dropped by a named filter; the name stands in ``disposition_reason``."""
    CANCELLED = "cancelled"
