"""Who makes a request: what a client says of its agent, its context window and its purpose."""

from dataclasses import dataclass

from longarc.records.segment import SegmentKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What one request says of itself; a field is None where the client does not tell.

    A request with a lineage, even an empty one, comes from a client that owns its context: the session
    then recognises agents, windows, summaries and side requests. A request without one does not.
    """

    agent_id: str | None = None
    """The client's name for the agent that asks; the main agent of most clients has none."""
    parent_agent_id: str | None = None
    """The client's name for the agent that started this one."""
    thread_id: str | None = None
    """Name of the agent's conversation, where the main agent has one too: the first of a session is the main one."""
    parent_thread_id: str | None = None
    window: int | None = None
    """Number of the agent's context window; it grows with each compaction."""
    kind: SegmentKind | None = None
    """What the request is for."""
