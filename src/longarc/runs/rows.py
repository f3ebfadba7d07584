"""What a ledger row says of a trajectory, and what it may say."""

from collections.abc import Iterable
from itertools import compress

from longarc.errors import LedgerError
from longarc.records.outcome import Disposition, Outcome
from longarc.records.segment import Segment
from longarc.records.trajectory import Admission, Trajectory

COLUMNS = (
    "id",
    "stage",
    "group_id",
    "task_id",
    "family",
    "outcome",
    "reward",
    "num_turns",
    "num_segments",
    "num_tokens",
    "num_sampled_tokens",
    "num_trained_tokens",
    "oldest_version",
    "newest_version",
    "difficulty",
    "started_at_s",
    "duration_s",
    "error",
)
"""Columns that repeat what the payload says."""


def trajectory_columns(trajectory: Trajectory) -> dict[str, object]:
    """Return what can be searched and counted without decoding a payload, by column."""
    oldest, newest = _versions(trajectory.segments)
    return {
        "id": trajectory.id,
        "stage": trajectory.stage,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "family": trajectory.family,
        "outcome": trajectory.outcome,
        "reward": trajectory.reward,
        "num_turns": trajectory.num_turns,
        "num_segments": len(trajectory.segments),
        "num_tokens": sum(len(segment.token_ids) for segment in trajectory.segments),
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "num_trained_tokens": trajectory.num_trained_tokens,
        "oldest_version": oldest,
        "newest_version": newest,
        "difficulty": trajectory.difficulty,
        "started_at_s": trajectory.started_at_s,
        "duration_s": trajectory.duration_s,
        "error": storable_text(trajectory.error),
    }


def check_disposition(
    trajectory_id: str, disposition: Disposition | None, reason: str | None
) -> None:
    """Refuse dispositions that cannot be set from outside a step, or lack their reason.

    Raises:
        LedgerError: it is ``trained``, ``filtered`` without a name, or a reason without a disposition.
    """
    if disposition is Disposition.TRAINED:
        raise LedgerError(
            f"trajectory {trajectory_id!r} becomes trained only by the step that uses it: call commit_step"
        )
    if disposition is Disposition.FILTERED and not reason:
        raise LedgerError(
            f"trajectory {trajectory_id!r} is filtered, but by what? Give the reason."
        )
    if disposition is None and reason is not None:
        raise LedgerError(
            f"trajectory {trajectory_id!r} has a reason ({reason}) and no disposition"
        )


def storable_text(text: str | None) -> str | None:
    """Spell out lone surrogates, which SQLite's UTF-8 cannot hold; the payload keeps the original."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def cancelled_trajectory(admission: Admission, *, at_s: float) -> Trajectory:
    """Return the empty trajectory of a rollout that a stop cut off [at_s: seconds since the epoch]."""
    return Trajectory(
        id=admission.trajectory_id,
        stage=admission.stage,
        group_id=admission.group_id,
        task_id=admission.task.id,
        family=admission.task.family,
        outcome=Outcome.CANCELLED_SHUTDOWN,
        reward=None,
        reward_parts={},
        segments=(),
        messages=admission.task.messages,
        tools=admission.task.tools,
        num_turns=0,
        difficulty=admission.task.difficulty,
        started_at_s=at_s,
        duration_s=0.0,
        error="in flight when the run stopped",
    )


def _versions(segments: Iterable[Segment]) -> tuple[int | None, int | None]:
    sampled: set[int] = set()
    for segment in segments:
        sampled.update(compress(segment.policy_versions, segment.is_sampled))
    return min(sampled, default=None), max(sampled, default=None)
