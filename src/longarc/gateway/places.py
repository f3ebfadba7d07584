"""Which agent spoke each turn, in which window, and what for: worked out from all turns of a session.

::

    main      0--1--2--S      S: a summary, known by its prompt, its header, or by the window that quotes it
                      `-> 4--5         window 1 of main
    agent-1         3                  a conversation with tools of its own: a sub-agent of who spoke before
    main      q                        q: title, probe: a side request, never trained

Headers decide where a client sends them (``Lineage``). Else these rules hold, for a conversation that
continues no stored turn (``RecognitionRules`` has their numbers and phrases):

1. One that asks for a summary by a known phrase is a summary of the agent whose answers it holds.
2. One by a side phrase, or a probe for a handful of tokens, is beside the work; so is one without tools
   that was never continued and holds nobody's answers, in a session whose agents have tools.
3. One that holds an agent's answers, or opens like the main one, is the next window of that agent.
4. Any other is a new agent: the main one if it is the first, else a sub-agent of who spoke last.

A turn that only one later window of its agent quotes, and no other turn beside it, is a summary.
The result depends on nothing but the turns, so a restored session has the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longarc.gateway.asked import Asked, RecognitionRules
from longarc.gateway.tree import Node
from longarc.records.segment import MAIN_AGENT, SegmentKind


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn stands."""

    agent_id: str = MAIN_AGENT
    parent_agent_id: str | None = None
    window: int = 0
    kind: SegmentKind = SegmentKind.EXEC
    origin: int | None = None
    """Of a turn that continues none: the turn it grew out of."""


def places(nodes: Sequence[Node], rules: RecognitionRules) -> list[Place]:
    """Return the place of each turn.

    Args:
        nodes: the turns of a session, in order.
        rules: how to tell what no header says.
    """
    if all(node.asked is None for node in nodes):
        return [_unclaimed(node) for node in nodes]
    return _Recogniser(nodes, rules).run()


def _unclaimed(node: Node) -> Place:
    # A rewritten history shares no turn with what it replaces: it grew out of the last one.
    is_later_root = node.parent is None and node.index > 0
    return Place(origin=node.index - 1 if is_later_root else None)


@dataclass(slots=True)
class _Agent:
    """What is known of an agent while the turns are read."""

    parent_agent_id: str | None
    root: Asked | None
    """How its newest conversation opened."""
    window: int = 0
    newest: int = -1
    """Its newest turn."""


class _Recogniser:
    def __init__(self, nodes: Sequence[Node], rules: RecognitionRules) -> None:
        self._nodes = nodes
        self._rules = rules
        self._agents: dict[str, _Agent] = {}
        self._places: list[Place] = []
        self._main_thread: str | None = None
        self._main_name = MAIN_AGENT
        self._last_speaker = MAIN_AGENT
        self._continued = {node.parent for node in nodes if node.parent is not None}
        self._has_tools = any(node.asked is not None and node.asked.tools for node in nodes)

    def run(self) -> list[Place]:
        """Place all turns."""
        for node in self._nodes:
            place = self._place(node)
            self._places.append(place)
            if place.kind is not SegmentKind.SIDE:
                agent = self._agents.setdefault(
                    place.agent_id, _Agent(place.parent_agent_id, node.asked)
                )
                agent.newest, agent.window = node.index, place.window
                if node.parent is None and place.kind is SegmentKind.EXEC:
                    agent.root = node.asked
                self._last_speaker = place.agent_id
        self._mark_carried()
        return self._places

    def _place(self, node: Node) -> Place:
        asked = node.asked
        if asked is None:
            return _unclaimed(node) if node.parent is None else self._places[node.parent]
        kind = self._kind(node, asked)
        if node.parent is not None:
            return self._continued_place(self._places[node.parent], asked, kind)
        claimed = self._claimed_agent(asked)
        name, parent_name = claimed or self._found_agent(asked, kind)
        if name not in self._agents and kind is SegmentKind.SIDE:
            name, parent_name = self._main_name, None
        known = self._agents.get(name)
        return Place(
            agent_id=name,
            parent_agent_id=parent_name if known is None else known.parent_agent_id,
            window=self._window(asked, known, kind),
            kind=kind,
            origin=self._origin(asked, known, parent_name),
        )

    def _continued_place(self, parent: Place, asked: Asked, kind: SegmentKind) -> Place:
        """Return the place of a turn that continues another; a client may hand a conversation to another agent."""
        place = replace(parent, kind=kind, origin=None)
        claimed = self._claimed_agent(asked)
        if claimed is not None and claimed[0] != parent.agent_id:
            known = self._agents.get(claimed[0])
            place = Place(
                agent_id=claimed[0],
                parent_agent_id=claimed[1] if known is None else known.parent_agent_id,
                kind=kind,
            )
        window = asked.lineage.window
        return place if window is None else replace(place, window=window)

    def _kind(self, node: Node, asked: Asked) -> SegmentKind:
        if asked.lineage.kind is not None:
            return asked.lineage.kind
        if asked.hint is not None:
            return asked.hint
        if node.parent is not None:
            parent = self._places[node.parent].kind
            return SegmentKind.SIDE if parent is SegmentKind.SIDE else SegmentKind.EXEC
        if asked.tools:
            return SegmentKind.EXEC
        wanted = asked.max_new_tokens
        if wanted is not None and wanted <= self._rules.side_max_new_tokens:
            return SegmentKind.SIDE
        is_alone = node.index not in self._continued and asked.echoes is None
        if self._rules.toolless_is_side and self._has_tools and is_alone:
            # Named agents say themselves who they are; a window that opens with a summary is work.
            names_itself = asked.lineage.agent_id is not None
            return SegmentKind.EXEC if names_itself or self._succeeds(asked) else SegmentKind.SIDE
        return SegmentKind.EXEC

    def _succeeds(self, asked: Asked) -> bool:
        """Whether a conversation opens as the newest one of the agent whose answer it quotes."""
        carries = self._carried(asked)
        if carries is None:
            return False
        agent = self._agents.get(self._places[carries].agent_id)
        return agent is not None and _opens_like(asked, agent.root)

    def _claimed_agent(self, asked: Asked) -> tuple[str, str | None] | None:
        """Return the names that headers give to the agent and to its parent."""
        lineage = asked.lineage
        if lineage.agent_id is not None:
            if not self._agents:
                self._main_name = lineage.agent_id
            is_main = lineage.agent_id == self._main_name
            parent = lineage.parent_agent_id or (None if is_main else self._main_name)
            return lineage.agent_id, None if parent == lineage.agent_id else parent
        if lineage.thread_id is None:
            return None
        if self._main_thread is None:
            self._main_thread = lineage.parent_thread_id or lineage.thread_id
        if lineage.thread_id == self._main_thread:
            return self._main_name, None
        above = lineage.parent_thread_id
        return lineage.thread_id, self._main_name if above in (None, self._main_thread) else above

    def _found_agent(self, asked: Asked, kind: SegmentKind) -> tuple[str, str | None]:
        """Return whose conversation it is, as far as its text tells, and that agent's parent."""
        if kind is SegmentKind.SIDE:
            return self._main_name, None
        for link in (asked.echoes, self._carried(asked)):
            if link is None:
                continue
            name = self._places[link].agent_id
            agent = self._agents.get(name)
            is_its = link == asked.echoes or kind is SegmentKind.SUMMARY
            if agent is not None and (is_its or _opens_like(asked, agent.root)):
                return name, agent.parent_agent_id
        if not self._agents:
            return self._main_name, None
        main = self._agents.get(self._main_name)
        if main is not None and (_opens_alike(asked, main.root) or kind is SegmentKind.SUMMARY):
            return self._main_name, None
        return f"agent-{len(self._agents)}", self._last_speaker

    def _window(self, asked: Asked, known: _Agent | None, kind: SegmentKind) -> int:
        if asked.lineage.window is not None:
            return asked.lineage.window
        if known is None:
            return 0
        return known.window + (kind is SegmentKind.EXEC)

    def _origin(
        self, asked: Asked, known: _Agent | None, parent_agent_id: str | None
    ) -> int | None:
        """Return the turn that a new conversation grew out of."""
        if known is not None and asked.lineage.window is not None:
            newest = known.newest
            if newest >= 0 and self._places[newest].kind is SegmentKind.SUMMARY:
                # A client that counts its windows goes on from the summary it asked for, whatever it quotes besides.
                return newest
        for link in (self._carried(asked), asked.echoes):
            if link is not None:
                return link
        if known is not None:
            return known.newest if known.newest >= 0 else None
        if parent_agent_id is None:
            return None
        parent = self._agents.get(parent_agent_id)
        return None if parent is None else parent.newest

    def _carried(self, asked: Asked) -> int | None:
        """Return the turn that a conversation quotes, unless that turn is beside the work by its own words."""
        if asked.carries is None:
            return None
        quoted = self._nodes[asked.carries].asked
        is_side = quoted is not None and SegmentKind.SIDE in (quoted.hint, quoted.lineage.kind)
        return None if is_side else asked.carries

    def _mark_carried(self) -> None:
        """Make summaries of the turns whose answers open a later window of their agent."""
        for node in self._nodes:
            asked = node.asked
            carries = None if asked is None else self._carried(asked)
            if node.parent is not None or carries is None:
                continue
            source, place = self._places[carries], self._places[node.index]
            claim = self._nodes[carries].asked
            if claim is None or claim.lineage.kind is not None:
                continue
            is_summariser = self._nodes[carries].parent is None and not claim.tools
            if place.kind is SegmentKind.EXEC and (
                source.agent_id == place.agent_id or is_summariser
            ):
                self._places[carries] = replace(source, kind=SegmentKind.SUMMARY)


def _opens_alike(asked: Asked, other: Asked | None) -> bool:
    """Whether two conversations open with the same tools and the same system prompt."""
    return other is not None and asked.tools == other.tools and asked.opening == other.opening


def _opens_like(asked: Asked, other: Asked | None) -> bool:
    """Whether they open with the same tools, or the same system prompt: enough where one quotes the other."""
    if other is None:
        return False
    return asked.opening == other.opening or (bool(asked.tools) and asked.tools == other.tools)
