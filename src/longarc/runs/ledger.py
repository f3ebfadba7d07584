"""The trajectory ledger: what was admitted, how it ended, and what became of it; exactly once.

::

    admit -> (turns ...) -> complete -> commit_step    trained: a use row and a disposition
                               |  \\---> dispose        stale, filtered, dropped ...
                               \\------> with disposition: evaluated, served, collected

Each arrow is one transaction. What ``complete`` and ``commit_step`` return for is on the disk, so a
``kill -9`` between any two instructions loses nothing that anybody was told about. A crash leaves
open admissions (``cancel_open`` gives them another attempt) and buffered trajectories (``pending``).
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from longarc.errors import ContractError, LedgerError
from longarc.records.batch import Batch, StepReport
from longarc.records.outcome import Disposition, Outcome
from longarc.records.task import Task
from longarc.records.trajectory import Admission, Trajectory
from longarc.runs.codec import (
    batch_sha256,
    body_sha256,
    compress,
    encode_report,
    encode_task,
    trajectory_body,
)
from longarc.runs.database import Database
from longarc.runs.reader import LedgerReader
from longarc.runs.replay import load_admissions, load_trajectories
from longarc.runs.rows import (
    cancelled_trajectory,
    check_disposition,
    storable_text,
    trajectory_columns,
)

_OPEN = "NOT EXISTS (SELECT 1 FROM trajectories x WHERE x.id = a.trajectory_id)"

_NEWEST = (
    "NOT EXISTS (SELECT 1 FROM admissions b WHERE b.stage = a.stage AND b.group_index = a.group_index "
    "AND b.member_index = a.member_index AND b.attempt > a.attempt)"
)


class Ledger(LedgerReader):
    """The writing half. One writer per file; usable from any thread."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        """Take over an open database; use ``open``."""
        super().__init__(database)
        self._clock = clock
        self._undecided: dict[str, tuple[Trajectory, str]] = {}
        """What was completed here and has no disposition yet, with the digest of its body."""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        busy_timeout_s: float = 5.0,
    ) -> Self:
        """Open a ledger, creating it where there is none.

        Args:
            path: the file; SQLite keeps two more beside it while the ledger is open.
            clock: wall clock [seconds since the epoch].
            busy_timeout_s: how long to wait for another writer [seconds].

        Raises:
            LedgerError: it is damaged, locked, from a newer version or not a ledger.
            ResourceError: the disk is full or the place is not writable.
        """
        return cls(Database.open(path, busy_timeout_s=busy_timeout_s), clock=clock)

    # --------------------------------------------------------------- admission

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Record the right to run rollouts, all or none.

        Raises:
            LedgerError: a trajectory id or a place (group, member, attempt) is taken.
        """
        digests: dict[int, str] = {}  # by identity: the members of a group have one task
        with self._database.transaction(durable=False):
            for admission in admissions:
                task = admission.task
                if id(task) not in digests:
                    digests[id(task)] = self._store_task(task)
                self._admit(admission, digests[id(task)])

    def _store_task(self, task: Task) -> str:
        payload = encode_task(task)
        digest = body_sha256(payload)
        self._database.execute("INSERT OR IGNORE INTO tasks VALUES (?, ?)", (digest, payload))
        return digest

    def _admit(self, admission: Admission, task_digest: str) -> None:
        clash = self._database.row(
            "SELECT trajectory_id FROM admissions WHERE trajectory_id = ? OR (stage = ? AND "
            "group_index = ? AND member_index = ? AND attempt = ?)",
            (
                admission.trajectory_id,
                admission.stage,
                admission.group_index,
                admission.member_index,
                admission.attempt,
            ),
        )
        if clash:
            raise LedgerError(
                f"rollout {admission.trajectory_id!r} (group {admission.group_index}, member "
                f"{admission.member_index}, attempt {admission.attempt}) was admitted before as "
                f"{clash[0]!r}: every attempt is admitted once; raise `attempt` to run it again"
            )
        self._database.insert(
            "admissions",
            trajectory_id=admission.trajectory_id,
            stage=admission.stage,
            group_id=admission.group_id,
            group_index=admission.group_index,
            member_index=admission.member_index,
            attempt=admission.attempt,
            task_sha256=task_digest,
            policy_version=admission.policy_version,
            seed=str(admission.seed),
            admitted_at_s=self._clock(),
        )

    def admissions(self, stage: str) -> list[Admission]:
        """Return every admission of a stage, in order."""
        return load_admissions(self._database, "a.stage = ?", (stage,))

    def open_admissions(self, stage: str) -> list[Admission]:
        """Return what was admitted and has not ended: in flight, or lost in a crash."""
        return load_admissions(self._database, f"a.stage = ? AND {_OPEN}", (stage,))

    def num_groups_admitted(self, stage: str) -> int:
        """Return the admission cursor: the ``group_index`` that comes next."""
        (newest,) = self._database.rows(
            "SELECT max(group_index) FROM admissions WHERE stage = ?", (stage,)
        )[0]
        return 0 if newest is None else int(newest) + 1

    def cancel_open(self, stage: str) -> list[Admission]:
        """End what a crash or a stop left open, and return what has to be admitted again.

        Every open admission becomes an empty trajectory with outcome ``cancelled_shutdown`` and
        disposition ``cancelled``. Returned is every place (group, member) whose newest attempt ended
        so and has no successor, earlier calls included: a crash between this call and the admission
        of the next attempt must not lose a place. Admit them with ``attempt + 1``.
        """
        with self._database.transaction(durable=True):
            for admission in self.open_admissions(stage):
                self._complete(
                    cancelled_trajectory(admission, at_s=self._clock()),
                    disposition=Disposition.CANCELLED,
                    reason="in flight when the run stopped",
                )
        return load_admissions(
            self._database,
            f"a.stage = ? AND {_NEWEST} AND EXISTS (SELECT 1 FROM trajectories x "
            "WHERE x.id = a.trajectory_id AND x.outcome = ?)",
            (stage, Outcome.CANCELLED_SHUTDOWN),
        )

    # ---------------------------------------------------------------- turn log

    def append_turn(self, session_id: str, index: int, payload: bytes) -> None:
        """Append one turn to a session's log; ``complete`` folds the log into the trajectory.

        Raises:
            LedgerError: the session has this turn already, or is complete.
        """
        with self._database.transaction(durable=False):
            if self._exists(session_id):
                raise LedgerError(
                    f"turn {index} of session {session_id!r} came after the session was complete: "
                    "close a session before its trajectory is recorded"
                )
            if self._database.row(
                "SELECT 1 FROM turns WHERE session_id = ? AND turn_index = ?", (session_id, index)
            ):
                raise LedgerError(f"session {session_id!r} has a turn {index} already")
            self._database.insert(
                "turns", session_id=session_id, turn_index=index, payload=bytes(payload)
            )

    def turns(self, session_id: str) -> list[bytes]:
        """Return the turn log of an open session, in order; empty once it is complete."""
        rows = self._database.rows(
            "SELECT payload FROM turns WHERE session_id = ? ORDER BY turn_index", (session_id,)
        )
        return [bytes(row[0]) for row in rows]

    def logged_sessions(self, *, prefix: str) -> list[str]:
        """Return the sessions with a turn log whose id starts with ``prefix``: open, or cut off by a crash."""
        rows = self._database.rows("SELECT DISTINCT session_id FROM turns ORDER BY session_id")
        return [session_id for (session_id,) in rows if session_id.startswith(prefix)]

    # -------------------------------------------------------------- completion

    def complete(
        self,
        trajectory: Trajectory,
        *,
        disposition: Disposition | None = None,
        reason: str | None = None,
    ) -> None:
        """Record the end of a rollout; when this returns, no death of a process can lose it.

        A loss of power can lose the trajectories since the last recorded step: the ledger is then the one
        of an earlier moment, and a resumed stage runs those rollouts again. Waiting for the disk after
        each of a hundred rollouts a second would cost more than half of the time. A served session,
        which nobody can run again, is on the disk when this returns.

        Args:
            trajectory: what happened; its turn log is folded (deleted) in the same transaction.
            disposition: set where it is known already (evaluated, served, excluded at birth).
            reason: why, for people; the filter's name for ``filtered``.

        Raises:
            LedgerError: it was completed before, contradicts its admission, or asks for ``trained``.
            ContractError: it holds something that cannot be stored.
        """
        # Encoding is the expensive part and needs no lock.
        body = trajectory_body(trajectory)
        with self._database.transaction(durable=disposition is Disposition.SERVED):
            self._complete(trajectory, disposition=disposition, reason=reason, body=body)

    def _complete(
        self,
        trajectory: Trajectory,
        *,
        disposition: Disposition | None,
        reason: str | None,
        body: bytes | None = None,
    ) -> None:
        check_disposition(trajectory.id, disposition, reason)
        self._check_new(trajectory)
        body = trajectory_body(trajectory) if body is None else body
        digest = body_sha256(body)
        sequence = self._database.insert(
            "trajectories",
            **trajectory_columns(trajectory),
            completed_at_s=self._clock(),
            sha256=digest,
            disposition=disposition,
            disposition_reason=storable_text(reason),
        )
        self._database.insert("payloads", sequence=sequence, payload=compress(body))
        self._database.execute("DELETE FROM turns WHERE session_id = ?", (trajectory.id,))
        if disposition is None:
            self._undecided[trajectory.id] = (trajectory, digest)

    def collect(self, trajectories: Iterable[Trajectory], *, reason: str) -> int:
        """Record trajectories that were not sampled here, all or none, as ``collected``; durable.

        They are read inside the transaction: what reading one raises leaves the ledger as it was.

        Args:
            trajectories: under ids that no rollout of this run gets.
            reason: where they come from, for people.

        Returns:
            How many.

        Raises:
            LedgerError: the ledger has one of them already.
            ContractError: one holds something that cannot be stored.
        """
        number = 0
        with self._database.transaction(durable=True):
            for trajectory in trajectories:
                if self._exists(trajectory.id):
                    raise LedgerError(
                        f"ledger {self._database.path} has trajectory {trajectory.id!r} already; nothing was added. "
                        f"Leave out what was imported before, and give each trajectory an id of its own"
                    )
                self._complete(trajectory, disposition=Disposition.COLLECTED, reason=reason)
                number += 1
        return number

    def _check_new(self, trajectory: Trajectory) -> None:
        if self._exists(trajectory.id):
            raise LedgerError(
                f"trajectory {trajectory.id!r} is complete already: a rollout ends once; run it "
                "again under a new attempt"
            )
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise ContractError(
                f"trajectory {trajectory.id!r} has reward {trajectory.reward}: a reward is finite, "
                "or None with outcome grader_failed"
            )
        admitted = self._database.row(
            "SELECT stage, group_id FROM admissions WHERE trajectory_id = ?", (trajectory.id,)
        )
        if admitted not in (None, (trajectory.stage, trajectory.group_id)):
            raise LedgerError(
                f"trajectory {trajectory.id!r} says stage {trajectory.stage!r}, group "
                f"{trajectory.group_id!r}, but was admitted as {admitted}"
            )

    def _exists(self, trajectory_id: str) -> bool:
        found = self._database.row("SELECT 1 FROM trajectories WHERE id = ?", (trajectory_id,))
        return found is not None

    def pending(self, stage: str) -> list[Trajectory]:
        """Return complete trajectories without a disposition (buffered), in completion order."""
        return list(
            load_trajectories(self._database, "t.stage = ? AND t.disposition IS NULL", (stage,))
        )

    # ------------------------------------------------------------- disposition

    def dispose(self, dispositions: Mapping[str, tuple[Disposition, str | None]]) -> None:
        """Say what became of trajectories that no step uses, all or none; durable.

        Args:
            dispositions: by trajectory id, with a reason for people (the filter's name for ``filtered``).

        Raises:
            LedgerError: one is unknown, has a disposition already, or would become ``trained``.
        """
        with self._database.transaction(durable=True):
            self._dispose(dispositions)

    def _dispose(self, dispositions: Mapping[str, tuple[Disposition, str | None]]) -> None:
        for trajectory_id, (disposition, reason) in dispositions.items():
            check_disposition(trajectory_id, disposition, reason)
            self._set_disposition(trajectory_id, disposition, reason)

    def _set_disposition(
        self, trajectory_id: str, disposition: Disposition, reason: str | None
    ) -> None:
        changed = self._database.execute(
            "UPDATE trajectories SET disposition = ?, disposition_reason = ? "
            "WHERE id = ? AND disposition IS NULL",
            (disposition, storable_text(reason), trajectory_id),
        )
        if not changed:
            row = self.row(trajectory_id)
            raise LedgerError(
                f"trajectory {trajectory_id!r} cannot become {disposition}: "
                + (f"it is {row.disposition} already" if row else "it is not complete")
            )
        self._undecided.pop(trajectory_id, None)

    # ------------------------------------------------------------------- steps

    def commit_step(
        self,
        batch: Batch,
        report: StepReport,
        *,
        filtered: Mapping[str, tuple[Disposition, str | None]] | None = None,
    ) -> None:
        """Record one optimizer step and what it consumed, in one transaction; durable.

        Every trajectory of the batch gets a use row and, at its first use, the disposition
        ``trained``. Algorithms that reuse data name a trajectory in several steps.

        Args:
            batch: what was trained on; the trajectories must be those that were completed, unchanged.
            report: what the step did.
            filtered: what else was decided while this batch was put together.

        Raises:
            LedgerError: the step is not the next one, versions do not join, or a trajectory is
                unknown, altered or already excluded.
        """
        digests = {
            trajectory.id: self._digest(trajectory)
            for group in batch.groups
            for trajectory in group.trajectories
        }
        with self._database.transaction(durable=True):
            self._check_next(batch, report)
            self._database.insert(
                "steps",
                stage=batch.stage,
                step=batch.step,
                trainer_version=batch.trainer_version,
                policy_version=report.policy_version,
                weights_sha256=report.weights_sha256,
                batch_sha256=batch_sha256(batch, digests),
                resets_optimizer=batch.resets_optimizer,
                num_trained_tokens=report.num_trained_tokens,
                committed_at_s=self._clock(),
                report=encode_report(report),
            )
            self._use(batch, digests)
            self._dispose(filtered or {})

    def _digest(self, trajectory: Trajectory) -> str:
        """Return the digest of a trajectory's body, which is known of the very object that was completed."""
        completed, digest = self._undecided.get(trajectory.id, (None, ""))
        return digest if completed is trajectory else body_sha256(trajectory_body(trajectory))

    def _check_next(self, batch: Batch, report: StepReport) -> None:
        newest = self._database.row(
            "SELECT step, policy_version FROM steps WHERE stage = ? ORDER BY step DESC LIMIT 1",
            (batch.stage,),
        )
        expected = newest[0] + 1 if newest else 0
        if not batch.step == report.step == expected:
            raise LedgerError(
                f"stage {batch.stage!r}: the ledger expects step {expected} next, the batch says "
                f"{batch.step} and the report {report.step}"
            )
        if newest and batch.trainer_version != newest[1]:
            raise LedgerError(
                f"stage {batch.stage!r}, step {batch.step}: the batch was trained by weights of version "
                f"{batch.trainer_version}, but the step before left version {newest[1]}. Resume from "
                "the checkpoint of that step, or replay the steps since the checkpoint."
            )
        if report.policy_version < batch.trainer_version:
            raise LedgerError(
                f"stage {batch.stage!r}, step {batch.step}: the version went back from "
                f"{batch.trainer_version} to {report.policy_version}"
            )

    def _use(self, batch: Batch, digests: Mapping[str, str]) -> None:
        seen: set[str] = set()
        for position, group in enumerate(batch.groups):
            self._database.insert(
                "step_groups",
                stage=batch.stage,
                step=batch.step,
                position=position,
                group_id=group.id,
                task_id=group.task_id,
                family=group.family,
            )
            members = zip(group.trajectories, group.multiplicities, strict=True)
            for member, (trajectory, multiplicity) in enumerate(members):
                if trajectory.id in seen:
                    raise LedgerError(
                        f"step {batch.step} of stage {batch.stage!r} names trajectory "
                        f"{trajectory.id!r} twice: say it once, with its multiplicity"
                    )
                seen.add(trajectory.id)
                self._check_usable(trajectory, digests[trajectory.id])
                self._database.insert(
                    "uses",
                    stage=batch.stage,
                    step=batch.step,
                    group_position=position,
                    member_position=member,
                    trajectory_id=trajectory.id,
                    multiplicity=multiplicity,
                )

    def _check_usable(self, trajectory: Trajectory, digest: str) -> None:
        stored = self._database.row(
            "SELECT sha256, disposition FROM trajectories WHERE id = ?", (trajectory.id,)
        )
        if stored is None:
            raise LedgerError(
                f"trajectory {trajectory.id!r} was trained on but never completed: record it with "
                "`complete` first"
            )
        if stored[0] != digest:
            raise LedgerError(
                f"trajectory {trajectory.id!r} was altered between completion and training, so the "
                "step could not be replayed: make every change (masks, rewards) before `complete`"
            )
        if stored[1] != Disposition.TRAINED:
            self._set_disposition(trajectory.id, Disposition.TRAINED, None)
