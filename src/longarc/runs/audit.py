"""The audit: does the ledger keep its promises?

Checked from the ledger alone:

* the file is whole, and every reference points at something;
* every admission has ended, in one trajectory;
* every trajectory has exactly one disposition; ``trained`` if and only if a step used it, and only
  where its ending was the policy's own doing and its tokens were sampled before the step;
* every payload has the digest it was stored with and agrees with its row;
* the steps of a stage are contiguous and their policy versions join;
* the batch of every step, rebuilt from the rows, has the recorded digest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longarc.errors import LedgerError
from longarc.records.outcome import Disposition, Outcome
from longarc.runs.codec import batch_sha256, body_sha256, decompress, trajectory_from_body
from longarc.runs.database import Database
from longarc.runs.replay import load_batch
from longarc.runs.rows import COLUMNS, trajectory_columns

_MAX_FINDINGS = 100
"""Findings that are listed; a damaged ledger has as many as rows."""

_TRAINABLE = ", ".join(f"'{outcome}'" for outcome in Outcome if outcome.is_trainable)

_RL_DISPOSITIONS = ", ".join(
    f"'{disposition}'"
    for disposition in Disposition
    if disposition not in (Disposition.EVALUATED, Disposition.SERVED, Disposition.COLLECTED)
)

_QUERIES = (
    (
        "SELECT a.trajectory_id FROM admissions a LEFT JOIN trajectories t ON t.id = a.trajectory_id "
        "WHERE t.id IS NULL",
        "admission {0} has not ended: still in flight, or resume the run",
    ),
    (
        "SELECT id, stage FROM trajectories WHERE disposition IS NULL",
        "trajectory {0} has no disposition: still buffered, or resume the run",
    ),
    (
        "SELECT t.id FROM trajectories t WHERE t.disposition = 'trained' "
        "AND NOT EXISTS (SELECT 1 FROM uses u WHERE u.trajectory_id = t.id)",
        "trajectory {0} is trained, but no step used it",
    ),
    (
        "SELECT u.trajectory_id, u.stage, u.step, t.disposition FROM uses u "
        "LEFT JOIN trajectories t ON t.id = u.trajectory_id "
        "WHERE t.disposition IS NOT 'trained'",
        "step {2} of stage {1} used trajectory {0}, whose disposition is {3}",
    ),
    (
        "SELECT t.id, t.outcome FROM trajectories t WHERE t.disposition = 'trained' "
        f"AND t.outcome NOT IN ({_TRAINABLE})",
        "trajectory {0} is trained, but ended as {1}, which is not the policy's own doing",
    ),
    (
        "SELECT t.id, t.disposition FROM trajectories t LEFT JOIN admissions a ON a.trajectory_id = t.id "
        f"WHERE t.disposition IN ({_RL_DISPOSITIONS}) AND a.trajectory_id IS NULL",
        "trajectory {0} is {1}, but was never admitted",
    ),
    (
        "SELECT u.trajectory_id, u.stage, u.step, t.newest_version, s.trainer_version FROM uses u "
        "JOIN steps s ON s.stage = u.stage AND s.step = u.step "
        "JOIN trajectories t ON t.id = u.trajectory_id WHERE t.newest_version > s.trainer_version",
        "step {2} of stage {1} used trajectory {0}, which version {3} sampled, with weights of version {4}",
    ),
    (
        "SELECT stage, step, expected FROM (SELECT stage, step, row_number() "
        "OVER (PARTITION BY stage ORDER BY step) - 1 AS expected FROM steps) WHERE step != expected",
        "stage {0}: step {1} stands where step {2} should",
    ),
    (
        "SELECT stage, step, trainer_version, before FROM (SELECT stage, step, trainer_version, "
        "lag(policy_version) OVER (PARTITION BY stage ORDER BY step) AS before FROM steps) "
        "WHERE before IS NOT NULL AND before != trainer_version",
        "stage {0}: step {1} started from version {2}, but the step before left version {3}",
    ),
    (
        "SELECT stage, step, trainer_version, policy_version FROM steps "
        "WHERE policy_version < trainer_version",
        "stage {0}: step {1} went back from version {2} to version {3}",
    ),
    (
        "SELECT DISTINCT n.session_id FROM turns n JOIN trajectories t ON t.id = n.session_id",
        "session {0} is complete, but its turn log was not folded",
    ),
    (
        "SELECT t.id FROM trajectories t LEFT JOIN payloads p USING (sequence) WHERE p.sequence IS NULL",
        "trajectory {0} has no payload",
    ),
)
"""Queries whose every row is a finding, and the finding in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the audit looked at and what it found."""

    num_admissions: int
    num_trajectories: int
    num_uses: int
    num_steps: int
    findings: tuple[str, ...]
    """What is wrong, in words; empty where every promise holds."""

    @property
    def ok(self) -> bool:
        """True where every promise holds."""
        return not self.findings


def audit(database: Database) -> AuditReport:
    """Check every promise of a ledger, at one moment of its life.

    Raises:
        LedgerError: the file is so damaged that it cannot be read.
    """
    with database.snapshot():
        findings: list[str] = []
        for finding in _findings(database):
            if len(findings) == _MAX_FINDINGS:
                findings.append(f"... and more than {_MAX_FINDINGS} in all")
                break
            findings.append(finding)
        counts = {
            f"num_{table}": database.rows(f"SELECT count(*) FROM {table}")[0][0]
            for table in ("admissions", "trajectories", "uses", "steps")
        }
    return AuditReport(findings=tuple(findings), **counts)


def _findings(database: Database) -> Iterator[str]:
    damage = _damage(database)
    if damage:
        # What the other checks would read through a damaged page means nothing.
        yield from (f"the file is damaged: {message}" for message in damage)
        return
    for table, rowid, parent, _ in database.rows("PRAGMA foreign_key_check"):
        yield f"row {rowid} of {table} points at a row of {parent} that is not there"
    for query, words in _QUERIES:
        for row in database.rows(query):
            yield words.format(*row)
    yield from _payload_findings(database)
    yield from _batch_findings(database)


def _damage(database: Database) -> list[str]:
    try:
        messages = [row[0] for row in database.rows("PRAGMA integrity_check(5)")]
    except LedgerError as error:
        # Some damage ends the check itself.
        return [str(error)]
    return [message for message in messages if message != "ok"]


def _payload_findings(database: Database) -> Iterator[str]:
    for (sequence,) in database.rows("SELECT sequence FROM payloads ORDER BY sequence"):
        row = database.row(
            f"SELECT t.{', t.'.join(COLUMNS)}, t.sha256, p.payload "
            "FROM payloads p JOIN trajectories t USING (sequence) WHERE p.sequence = ?",
            (sequence,),
        )
        if row is None:
            yield f"payload {sequence} belongs to no trajectory"
            continue
        *recorded, digest, payload = row
        try:
            body = decompress(payload)
            if body_sha256(body) != digest:
                yield f"trajectory {row[0]}: the payload has changed since it was stored"
                continue
            found = trajectory_columns(trajectory_from_body(body))
        except LedgerError as error:
            yield f"trajectory {row[0]}: {error}"
            continue
        for name, value in zip(COLUMNS, recorded, strict=True):
            if value != found[name]:
                yield f"trajectory {row[0]}: {name} is {value} in the row and {found[name]} in the payload"


def _batch_findings(database: Database) -> Iterator[str]:
    for stage, step, recorded in database.rows(
        "SELECT stage, step, batch_sha256 FROM steps ORDER BY stage, step"
    ):
        try:
            found = batch_sha256(load_batch(database, stage, step))
        except LedgerError as error:
            yield f"stage {stage}: the batch of step {step} cannot be rebuilt: {error}"
            continue
        if found != recorded:
            yield f"stage {stage}: the batch of step {step}, rebuilt, has digest {found[:12]}, recorded is {recorded[:12]}"
