"""From ledger rows back to the records they were made of."""

from collections.abc import Iterable, Iterator, Mapping

from longarc.errors import LedgerError
from longarc.records.batch import Batch
from longarc.records.trajectory import Admission, Group, Trajectory
from longarc.runs.codec import decode_task, decompress, trajectory_from_body
from longarc.runs.database import Database

_ADMISSION_COLUMNS = (
    "a.trajectory_id, a.stage, a.group_id, a.group_index, a.member_index, a.attempt, "
    "a.policy_version, a.seed, t.sha256, t.payload"
)


def load_admissions(
    database: Database, condition: str, values: Iterable[object] = ()
) -> list[Admission]:
    """Return the admissions (alias ``a``) that satisfy an SQL condition, in admission order."""
    rows = database.rows(
        f"SELECT {_ADMISSION_COLUMNS} FROM admissions a JOIN tasks t ON t.sha256 = a.task_sha256 "
        f"WHERE {condition} ORDER BY a.sequence",
        tuple(values),
    )
    # The members of a group share a task, so each is decoded once.
    tasks = {row[8]: row[9] for row in rows}
    decoded = {digest: decode_task(payload) for digest, payload in tasks.items()}
    return [
        Admission(
            trajectory_id=row[0],
            stage=row[1],
            group_id=row[2],
            group_index=row[3],
            member_index=row[4],
            attempt=row[5],
            policy_version=row[6],
            seed=int(row[7]),
            task=decoded[row[8]],
        )
        for row in rows
    ]


def load_bodies(
    database: Database, condition: str, values: Iterable[object] = ()
) -> Iterator[tuple[str, bytes]]:
    """Yield ``(trajectory id, body)`` where an SQL condition on ``trajectories t`` holds, in completion order."""
    sequences = database.rows(
        f"SELECT t.sequence FROM trajectories t WHERE {condition} ORDER BY t.sequence",
        tuple(values),
    )
    for (sequence,) in sequences:
        # One at a time: a stage's trajectories need not fit the memory.
        row = database.row(
            "SELECT t.id, p.payload FROM trajectories t JOIN payloads p USING (sequence) "
            "WHERE t.sequence = ?",
            (sequence,),
        )
        if row is None:
            raise LedgerError(
                f"ledger {database.path}: the trajectory in row {sequence} has no payload; "
                "restore the ledger from a copy"
            )
        yield row[0], decompress(row[1])


def load_trajectories(
    database: Database, condition: str, values: Iterable[object] = ()
) -> Iterator[Trajectory]:
    """Yield the trajectories that satisfy an SQL condition on ``trajectories t``, in completion order."""
    for _, body in load_bodies(database, condition, values):
        yield trajectory_from_body(body)


def load_batch(
    database: Database,
    stage: str,
    step: int,
    *,
    cache: Mapping[str, Trajectory] | None = None,
) -> Batch:
    """Rebuild what a step consumed.

    Raises:
        LedgerError: the stage has no such step, or rows are missing.
    """
    row = database.row(
        "SELECT trainer_version, resets_optimizer FROM steps WHERE stage = ? AND step = ?",
        (stage, step),
    )
    if row is None:
        (count,) = database.rows("SELECT count(*) FROM steps WHERE stage = ?", (stage,))[0]
        raise LedgerError(
            f"ledger {database.path} has no step {step} of stage {stage!r}: it holds {count} steps of it"
        )
    uses = database.rows(
        "SELECT group_position, trajectory_id, multiplicity FROM uses WHERE stage = ? AND step = ? "
        "ORDER BY group_position, member_position",
        (stage, step),
    )
    known = dict(cache or {})
    for _, trajectory_id, _ in uses:
        if trajectory_id not in known:
            known |= {t.id: t for t in load_trajectories(database, "t.id = ?", (trajectory_id,))}
        if trajectory_id not in known:
            raise LedgerError(
                f"step {step} of stage {stage!r} used trajectory {trajectory_id!r}, which is not there"
            )
    groups = database.rows(
        "SELECT position, group_id, task_id, family FROM step_groups WHERE stage = ? AND step = ? "
        "ORDER BY position",
        (stage, step),
    )
    return Batch(
        stage=stage,
        step=step,
        trainer_version=row[0],
        resets_optimizer=bool(row[1]),
        groups=tuple(
            Group(
                id=group_id,
                task_id=task_id,
                family=family,
                trajectories=tuple(known[t] for p, t, _ in uses if p == position),
                multiplicities=tuple(m for p, _, m in uses if p == position),
            )
            for position, group_id, task_id, family in groups
        ),
    )
