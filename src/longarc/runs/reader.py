"""The reading half of the trajectory ledger: what the report, the viewer and the command line need."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from longarc.errors import LedgerError
from longarc.records.batch import Batch, StepReport
from longarc.records.outcome import Disposition, Outcome
from longarc.records.trajectory import Trajectory
from longarc.runs.audit import AuditReport, audit
from longarc.runs.codec import decode_report
from longarc.runs.database import Database
from longarc.runs.replay import load_batch, load_trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One recorded step."""

    stage: str
    step: int
    trainer_version: int
    """Version [optimizer steps] of the weights before the step."""
    policy_version: int
    """Version [optimizer steps] of the weights after the step."""
    weights_sha256: str
    batch_sha256: str
    resets_optimizer: bool
    num_trained_tokens: int
    committed_at_s: float
    """Wall clock [seconds since the epoch]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """A trajectory without its tokens and messages."""

    id: str
    stage: str
    group_id: str
    task_id: str
    family: str
    outcome: Outcome
    reward: float | None
    num_turns: int
    num_segments: int
    num_tokens: int
    """Tokens of all segments [tokens]."""
    num_sampled_tokens: int
    num_trained_tokens: int
    oldest_version: int | None
    """Oldest weights [optimizer steps] that sampled a token; None where nothing was sampled."""
    newest_version: int | None
    difficulty: float
    started_at_s: float
    duration_s: float
    error: str | None
    completed_at_s: float
    disposition: Disposition | None
    """None while it waits to be used."""
    disposition_reason: str | None


_ROW_COLUMNS = tuple(TrajectoryRow.__dataclass_fields__)

CountBy = Literal["stage", "family", "outcome", "disposition", "disposition_reason", "task_id"]
"""Columns that trajectories can be counted by."""


class LedgerReader:
    """Reads a ledger, also while another process writes it."""

    def __init__(self, database: Database) -> None:
        """Take over an open database; use ``open``."""
        self._database = database

    @classmethod
    def open_read_only(cls, path: Path) -> "LedgerReader":
        """Open a ledger without the right to change it.

        Raises:
            LedgerError: it is missing, damaged or from a newer version.
        """
        return LedgerReader(Database.open(path, read_only=True))

    # ------------------------------------------------------------ trajectories

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """Return one trajectory.

        Raises:
            LedgerError: the ledger has no such trajectory.
        """
        found = list(load_trajectories(self._database, "t.id = ?", (trajectory_id,)))
        if not found:
            raise LedgerError(self.unknown(trajectory_id))
        return found[0]

    def unknown(self, trajectory_id: str) -> str:
        """Return the message for an id that is not here: it names the likeliest three."""
        likely = self._database.rows(
            "SELECT id FROM trajectories ORDER BY instr(id, ?) = 0, rowid LIMIT 3", (trajectory_id,)
        )
        names = ", ".join(repr(row[0]) for row in likely)
        hint = f"; there are {names}" if names else "; it has none at all"
        return f"ledger {self._database.path} has no trajectory {trajectory_id!r}{hint}"

    def trajectories(
        self,
        *,
        stage: str | None = None,
        family: str | None = None,
        outcome: Outcome | None = None,
        disposition: Disposition | None = None,
    ) -> Iterator[Trajectory]:
        """Yield whole trajectories in completion order, one in memory at a time."""
        condition, values = _condition(stage, family, outcome, disposition)
        return load_trajectories(self._database, condition, values)

    def rows(
        self,
        *,
        stage: str | None = None,
        family: str | None = None,
        outcome: Outcome | None = None,
        disposition: Disposition | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[TrajectoryRow]:
        """Return trajectories without their content, in completion order; -1 sets no limit."""
        condition, values = _condition(stage, family, outcome, disposition)
        rows = self._database.rows(
            f"SELECT {', '.join(_ROW_COLUMNS)} FROM trajectories t WHERE {condition} "
            "ORDER BY sequence LIMIT ? OFFSET ?",
            (*values, limit, offset),
        )
        return [_trajectory_row(dict(zip(_ROW_COLUMNS, row, strict=True))) for row in rows]

    def row(self, trajectory_id: str) -> TrajectoryRow | None:
        """Return one trajectory without its content, or None where there is none."""
        found = self._database.row(
            f"SELECT {', '.join(_ROW_COLUMNS)} FROM trajectories WHERE id = ?", (trajectory_id,)
        )
        return _trajectory_row(dict(zip(_ROW_COLUMNS, found, strict=True))) if found else None

    def counts(self, by: CountBy, *, stage: str | None = None) -> dict[str | None, int]:
        """Count trajectories by one column, most frequent first; None = not set yet."""
        condition, values = _condition(stage, None, None, None)
        return dict(
            self._database.rows(
                f"SELECT {by}, count(*) FROM trajectories t WHERE {condition} "
                f"GROUP BY {by} ORDER BY count(*) DESC, {by}",
                values,
            )
        )

    def stages(self) -> list[str]:
        """Return the stages with an admission, a trajectory or a step, in order of first appearance."""
        rows = self._database.rows(
            "SELECT stage FROM (SELECT stage, admitted_at_s AS at_s FROM admissions "
            "UNION ALL SELECT stage, completed_at_s FROM trajectories "
            "UNION ALL SELECT stage, committed_at_s FROM steps) GROUP BY stage ORDER BY min(at_s)"
        )
        return [row[0] for row in rows]

    # ------------------------------------------------------------------- steps

    def steps(self, stage: str | None = None) -> list[StepRow]:
        """Return the recorded steps of a stage (or of all), in order."""
        columns = tuple(StepRow.__dataclass_fields__)
        rows = self._database.rows(
            f"SELECT {', '.join(columns)} FROM steps WHERE stage = coalesce(?, stage) "
            "ORDER BY committed_at_s, stage, step",
            (stage,),
        )
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        return [
            StepRow(**(row | {"resets_optimizer": bool(row["resets_optimizer"])})) for row in named
        ]

    def batch(self, stage: str, step: int) -> Batch:
        """Rebuild exactly what a step consumed.

        Raises:
            LedgerError: the stage has no such step.
        """
        return load_batch(self._database, stage, step)

    def report(self, stage: str, step: int) -> StepReport:
        """Return what a step reported.

        Raises:
            LedgerError: the stage has no such step.
        """
        row = self._database.row(
            "SELECT report FROM steps WHERE stage = ? AND step = ?", (stage, step)
        )
        if row is None:
            raise LedgerError(f"ledger {self._database.path} has no step {step} of stage {stage!r}")
        return decode_report(row[0])

    def lag_histogram(self, stage: str) -> dict[int, int]:
        """Count uses by the lag [optimizer steps] that the oldest token had when it was trained on."""
        return dict(
            self._database.rows(
                "SELECT s.trainer_version - coalesce(t.oldest_version, s.trainer_version) AS lag, "
                "count(*) FROM uses u JOIN steps s USING (stage, step) "
                "JOIN trajectories t ON t.id = u.trajectory_id WHERE u.stage = ? GROUP BY lag ORDER BY lag",
                (stage,),
            )
        )

    def uses(self, trajectory_id: str) -> list[tuple[str, int, int]]:
        """Return ``(stage, step, multiplicity)`` of every use of a trajectory."""
        return self._database.rows(
            "SELECT stage, step, multiplicity FROM uses WHERE trajectory_id = ? ORDER BY stage, step",
            (trajectory_id,),
        )

    # ------------------------------------------------------------------- whole

    def audit(self) -> AuditReport:
        """Check every promise of the ledger; see ``longarc.runs.audit``."""
        return audit(self._database)

    def close(self) -> None:
        """Release the file."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _condition(
    stage: str | None, family: str | None, outcome: str | None, disposition: str | None
) -> tuple[str, list[str]]:
    wanted = {
        "t.stage": stage,
        "t.family": family,
        "t.outcome": outcome,
        "t.disposition": disposition,
    }
    given = {column: value for column, value in wanted.items() if value is not None}
    return " AND ".join(f"{column} = ?" for column in given) or "1", list(given.values())


def _trajectory_row(row: dict[str, object]) -> TrajectoryRow:
    disposition = row["disposition"]
    row["outcome"] = Outcome(str(row["outcome"]))
    row["disposition"] = None if disposition is None else Disposition(str(disposition))
    return TrajectoryRow(**row)  # type: ignore[arg-type]
