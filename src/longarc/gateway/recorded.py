"""A session as a trajectory: what the ledger keeps of a client that owns its context."""

from longarc.gateway.session import GatewaySession
from longarc.records.message import Message
from longarc.records.outcome import Outcome
from longarc.records.segment import SegmentKind
from longarc.records.trajectory import Reward, Trajectory
from longarc.records.turn import conversation


def recorded(
    session: GatewaySession,
    *,
    stage: str,
    outcome: Outcome,
    started_at_s: float,
    duration_s: float,
    reward: Reward | None = None,
    error: str | None = None,
) -> Trajectory:
    """Return the trajectory of a session that runs outside of any task; it may be closed.

    Args:
        session: whose turns they are; its id becomes the trajectory's.
        stage: what the ledger calls such sessions.
        outcome: how it ended.
        started_at_s: wall-clock start [seconds since the epoch].
        duration_s: how long it took [seconds].
        reward: what a grader said, if one was asked.
        error: what went wrong, if something did.
    """
    session_id = session.settings.session_id
    return Trajectory(
        id=session_id,
        stage=stage,
        group_id=session_id,
        task_id=session_id,
        family=stage,
        outcome=outcome,
        reward=None if reward is None else reward.value,
        reward_parts={} if reward is None else reward.parts,
        segments=session.segments(),
        messages=last_conversation(session),
        tools=session.tools(),
        num_turns=session.num_turns,
        difficulty=0.0,
        started_at_s=started_at_s,
        duration_s=duration_s,
        error=error,
        turns=session.turns(),
    )


def last_conversation(session: GatewaySession) -> tuple[Message, ...]:
    """Return the newest conversation of the main agent's work; empty where the session kept none."""
    segments, turns = session.segments(), session.turns()
    at_work = [
        position
        for position, turn in enumerate(turns)
        if segments[turn.segment_order].kind is SegmentKind.EXEC
    ]
    main = [p for p in at_work if segments[turns[p].segment_order].parent_agent_id is None]
    return conversation(turns, main[-1]) if main else ()
