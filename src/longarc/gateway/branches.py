"""Segments: the paths of a session's tree, each sampled token trained in the one that first held it.

The first continuation of a turn extends its segment where agent, window and kind stay the same; every
other one opens a new segment. So a summary is a segment of its own, whose context is the history that it
sums up, and the work that goes on without it extends the segment it left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longarc.gateway.places import Place
from longarc.gateway.tree import Node, SessionTree
from longarc.records.message import ToolSpec
from longarc.records.segment import NOT_SAMPLED, Segment, SegmentKind
from longarc.records.turn import Turn


@dataclass(slots=True)
class _Branches:
    """Who owns which turn."""

    owner: list[int]
    """Of each turn, the segment that trains it."""
    tips: list[Node]
    """Of each segment, its last turn."""
    parents: list[int | None]
    """Of each segment, the one it grew out of."""


def segments_of(tree: SessionTree, placed: Sequence[Place]) -> tuple[Segment, ...]:
    """Return the segments of a session, in the order the branches opened.

    Args:
        tree: the turns.
        placed: the place of each.
    """
    branches = _branches(tree.nodes, placed)
    return tuple(
        _segment(tree, tip, placed, order=order, parent=parent, owner=branches.owner)
        for order, (tip, parent) in enumerate(zip(branches.tips, branches.parents, strict=True))
    )


def tools_of(tree: SessionTree, placed: Sequence[Place]) -> tuple[ToolSpec, ...]:
    """Return the tools of the main agent's newest conversation; none where no request was kept.

    Args:
        tree: the turns.
        placed: the place of each.
    """
    for node, place in zip(reversed(tree.nodes), reversed(placed), strict=True):
        is_main = place.parent_agent_id is None and place.kind is SegmentKind.EXEC
        if node.asked is not None and node.parent is None and is_main:
            return node.asked.tools
    return ()


def turns_of(tree: SessionTree, placed: Sequence[Place]) -> tuple[Turn, ...]:
    """Return what was said in each turn whose request was kept, in order.

    Args:
        tree: the turns.
        placed: the place of each.
    """
    owner = _branches(tree.nodes, placed).owner
    turns: list[Turn] = []
    position: dict[int, int] = {}
    ends: list[int] = []
    for node in tree.nodes:
        start = (0 if node.parent is None else ends[node.parent]) + len(node.context_ids)
        ends.append(start + len(node.sampled_ids))
        if node.asked is None:
            continue
        position[node.index] = len(turns)
        turns.append(
            Turn(
                segment_order=owner[node.index],
                start=start,
                num_sampled=len(node.sampled_ids),
                parent=None if node.parent is None else position.get(node.parent),
                said=node.asked.said,
                answer=node.message,
                finish_reason=node.finish_reason,
                elapsed_s=node.asked.elapsed_s,
                tools=node.asked.tools if node.parent is None else (),
            )
        )
    return tuple(turns)


def _branches(nodes: Sequence[Node], placed: Sequence[Place]) -> _Branches:
    found = _Branches([], [], [])
    for node, place in zip(nodes, placed, strict=True):
        origin = node.parent if node.parent is not None else place.origin
        grown_from = None if origin is None else found.owner[origin]
        if (
            node.parent is not None
            and grown_from is not None
            and found.tips[grown_from].index == node.parent
            and _is_same_work(placed[node.parent], place)
        ):
            found.tips[grown_from] = node
            found.owner.append(grown_from)
            continue
        found.owner.append(len(found.tips))
        found.tips.append(node)
        found.parents.append(grown_from)
    return found


def _is_same_work(one: Place, other: Place) -> bool:
    return (one.agent_id, one.window, one.kind) == (other.agent_id, other.window, other.kind)


def _segment(
    tree: SessionTree,
    tip: Node,
    placed: Sequence[Place],
    *,
    order: int,
    parent: int | None,
    owner: Sequence[int],
) -> Segment:
    place = placed[tip.index]
    is_sampled: list[bool] = []
    train_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    kept: list[tuple[int, ...]] = []
    routing: list[bytes] = []
    for node in tree.path(tip):
        num_context, num_sampled = len(node.context_ids), len(node.sampled_ids)
        is_trained = owner[node.index] == order and place.kind is not SegmentKind.SIDE
        is_sampled += [False] * num_context + [True] * num_sampled
        train_mask += [False] * num_context + [is_trained] * num_sampled
        logprobs += [0.0] * num_context + node.logprobs.tolist()
        kept += [()] * num_context + list(node.kept_ids or [()] * num_sampled)
        routing += node.routing
        versions += [NOT_SAMPLED] * num_context
        for version, length in node.version_runs:
            versions += [version] * length
    return Segment(
        token_ids=tuple(tree.ids(tip)),
        is_sampled=tuple(is_sampled),
        train_mask=tuple(train_mask),
        behaviour_logprobs=tuple(logprobs),
        policy_versions=tuple(versions),
        kept_ids=tuple(kept) if any(kept) else None,
        # Of the last token nobody knows yet.
        routing=(*routing, b"") if routing else None,
        kind=place.kind,
        order=order,
        parent=parent,
        agent_id=place.agent_id,
        parent_agent_id=place.parent_agent_id,
        window=place.window,
    )
