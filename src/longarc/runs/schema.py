"""The tables of the trajectory ledger.

::

    tasks <-- admissions --> trajectories <-- uses --> step_groups --> steps
                                  |  \\
               turns (open sessions)   payloads

An admission is the right to run one rollout; a trajectory its end. A use is one trajectory in one
step. The disposition is a column of the trajectory, so that there cannot be two, and a trigger
keeps it from changing.
"""

SCHEMA_VERSION = 1
"""Version of these tables; kept in SQLite's ``user_version``."""

APPLICATION_ID = 0x4C415243
"""Marks a SQLite file as a LongArc ledger: ASCII "LARC"."""

DDL = (
    """CREATE TABLE tasks(
        sha256 TEXT PRIMARY KEY,
        payload BLOB NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE admissions(
        sequence INTEGER PRIMARY KEY,
        trajectory_id TEXT NOT NULL UNIQUE,
        stage TEXT NOT NULL,
        group_id TEXT NOT NULL,
        group_index INTEGER NOT NULL CHECK (group_index >= 0),
        member_index INTEGER NOT NULL CHECK (member_index >= 0),
        attempt INTEGER NOT NULL CHECK (attempt >= 0),
        task_sha256 TEXT NOT NULL REFERENCES tasks(sha256),
        policy_version INTEGER NOT NULL,
        seed TEXT NOT NULL,
        admitted_at_s REAL NOT NULL,
        UNIQUE (stage, group_index, member_index, attempt)
    )""",
    """CREATE TABLE trajectories(
        sequence INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        stage TEXT NOT NULL,
        group_id TEXT NOT NULL,
        task_id TEXT NOT NULL,
        family TEXT NOT NULL,
        outcome TEXT NOT NULL,
        reward REAL,
        num_turns INTEGER NOT NULL,
        num_segments INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        num_sampled_tokens INTEGER NOT NULL,
        num_trained_tokens INTEGER NOT NULL,
        oldest_version INTEGER,
        newest_version INTEGER,
        difficulty REAL NOT NULL,
        started_at_s REAL NOT NULL,
        duration_s REAL NOT NULL,
        error TEXT,
        completed_at_s REAL NOT NULL,
        sha256 TEXT NOT NULL,
        disposition TEXT,
        disposition_reason TEXT,
        CHECK (disposition IS NOT NULL OR disposition_reason IS NULL)
    )""",
    "CREATE INDEX trajectories_by_stage ON trajectories(stage, disposition)",
    "CREATE INDEX trajectories_by_group ON trajectories(stage, group_id)",
    """CREATE TABLE payloads(
        sequence INTEGER PRIMARY KEY REFERENCES trajectories(sequence),
        payload BLOB NOT NULL
    )""",
    """CREATE TABLE turns(
        session_id TEXT NOT NULL,
        turn_index INTEGER NOT NULL CHECK (turn_index >= 0),
        payload BLOB NOT NULL,
        PRIMARY KEY (session_id, turn_index)
    )""",
    """CREATE TABLE steps(
        stage TEXT NOT NULL,
        step INTEGER NOT NULL CHECK (step >= 0),
        trainer_version INTEGER NOT NULL,
        policy_version INTEGER NOT NULL,
        weights_sha256 TEXT NOT NULL,
        batch_sha256 TEXT NOT NULL,
        resets_optimizer INTEGER NOT NULL,
        num_trained_tokens INTEGER NOT NULL,
        committed_at_s REAL NOT NULL,
        report BLOB NOT NULL,
        PRIMARY KEY (stage, step)
    )""",
    """CREATE TABLE step_groups(
        stage TEXT NOT NULL,
        step INTEGER NOT NULL,
        position INTEGER NOT NULL,
        group_id TEXT NOT NULL,
        task_id TEXT NOT NULL,
        family TEXT NOT NULL,
        PRIMARY KEY (stage, step, position),
        UNIQUE (stage, step, group_id),
        FOREIGN KEY (stage, step) REFERENCES steps(stage, step)
    )""",
    """CREATE TABLE uses(
        stage TEXT NOT NULL,
        step INTEGER NOT NULL,
        group_position INTEGER NOT NULL,
        member_position INTEGER NOT NULL,
        trajectory_id TEXT NOT NULL REFERENCES trajectories(id),
        multiplicity INTEGER NOT NULL CHECK (multiplicity >= 1),
        PRIMARY KEY (stage, step, group_position, member_position),
        UNIQUE (stage, step, trajectory_id),
        FOREIGN KEY (stage, step, group_position) REFERENCES step_groups(stage, step, position)
    )""",
    "CREATE INDEX uses_by_trajectory ON uses(trajectory_id)",
    """CREATE TRIGGER one_disposition BEFORE UPDATE OF disposition, disposition_reason ON trajectories
        WHEN OLD.disposition IS NOT NULL
        BEGIN SELECT RAISE(ABORT, 'a trajectory has one disposition'); END""",
    """CREATE TRIGGER no_late_turn BEFORE INSERT ON turns
        WHEN EXISTS (SELECT 1 FROM trajectories WHERE id = NEW.session_id)
        BEGIN SELECT RAISE(ABORT, 'the session is complete'); END""",
)
"""Statements that create the tables, in order."""
