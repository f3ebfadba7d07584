"""The tree of one session: every completion, each below the turn whose ids it continued.

::

    turn 0: prompt p0, sampled c0
     +-- turn 1: tail t1, sampled c1           segment 0 = p0 c0 t1 c1        trains c0, c1
     |
     +-- turn 2: edited tail t2, sampled c2    segment 1 = p0 c0 t2 c2        trains c2 only
    turn 3: rewritten prompt p3, sampled c3    segment 2 = p3 c3              trains c3

A node holds only what it added. A segment is a path from a root to a tip. The first continuation of a
turn extends its segment, every other one opens a new segment, and a sampled token is trained only in
the segment that first held it.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from longarc.errors import ContractError
from longarc.records.message import Message, Role
from longarc.records.sampling import FinishReason
from longarc.records.segment import NOT_SAMPLED, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One turn: the ids it appended to its parent's, context first, then what was sampled."""

    index: int
    """Position of the turn in the session, by the time it was answered."""
    parent: int | None
    """Index of the turn whose ids these continue; None where the whole prompt was new."""
    key: bytes
    """Identity of the conversation up to and including the answer."""
    num_messages: int
    """Length of that conversation [messages]."""
    context_ids: "array[int]"
    """Ids between the parent's last and the first sampled one."""
    sampled_ids: "array[int]"
    logprobs: "array[float]"
    """log-probability [nats] of each sampled id."""
    version_runs: tuple[tuple[int, int], ...]
    """(policy version [optimizer steps], how many sampled ids in a row it produced)."""
    finish_reason: FinishReason
    message: Message
    """The answer as it was given to the client."""
    ids_digest: bytes
    """Digest of all ids from the root to the end of this turn."""
    kept_ids: tuple[tuple[int, ...], ...] = ()
    """Of each sampled id, the ids it was drawn from; () for the whole vocabulary. Empty where that holds for all."""


def digest_ids(ids: "array[int]") -> bytes:
    """Return a digest of some ids."""
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def id_array(ids: Sequence[int] = ()) -> "array[int]":
    """Return ids in four bytes each."""
    return array("I", ids)


class SessionTree:
    """All turns of one session."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._nodes: list[Node] = []
        self._by_key: dict[bytes, list[Node]] = {}

    @property
    def nodes(self) -> Sequence[Node]:
        """The turns, in the order they were answered."""
        return self._nodes

    def match(self, messages: Sequence[Message], keys: Sequence[bytes]) -> tuple[Node | None, int]:
        """Return the deepest stored turn that a conversation continues, and how many messages it covers."""
        for position in range(len(messages) - 1, -1, -1):
            candidates = self._by_key.get(keys[position])
            if candidates is None or messages[position].role is not Role.ASSISTANT:
                continue
            fitting = [node for node in candidates if self._echoes(node, messages)]
            if fitting:
                # Equal answers to one prompt differ only in the ids of their calls; the newest wins a tie.
                return max(
                    fitting, key=lambda n: (_same_call_ids(n.message, messages[position]), n.index)
                ), position + 1
        return None, 0

    def _echoes(self, node: Node, messages: Sequence[Message]) -> bool:
        """Whether reasoning that the client sent back is what was sampled, along the whole path."""
        for step in self._path(node):
            reasoning = messages[step.num_messages - 1].reasoning
            if reasoning and reasoning != step.message.reasoning:
                return False
        return True

    def as_answered(self, messages: Sequence[Message], keys: Sequence[bytes]) -> list[Message]:
        """Return a conversation with its answers as they were given, reasoning that the client left out included."""
        answered = list(messages)
        for position, message in enumerate(messages):
            if message.role is Role.ASSISTANT and not message.reasoning:
                for node in self._by_key.get(keys[position], ()):
                    answered[position] = node.message
        return answered

    def has_reasoning(self, node: Node | None) -> bool:
        """Whether any turn from the root to this one holds reasoning."""
        return any(step.message.reasoning for step in self._path(node))

    def ids(self, node: Node | None) -> "array[int]":
        """Return all ids from the root to the end of a turn.

        Raises:
            ContractError: they are not the ids that the engine saw when the turn was sampled.
        """
        path = self._path(node)
        ids = id_array()
        for step in path:
            ids += step.context_ids
            ids += step.sampled_ids
        if node is not None and digest_ids(ids) != node.ids_digest:
            raise ContractError(
                f"session {self._session_id}: the {len(ids)} ids stored up to turn {node.index} are not "
                f"those that the engine saw (digest {digest_ids(ids).hex()}, recorded "
                f"{node.ids_digest.hex()}). The session's tree or its turn log was altered: keep the "
                f"log and report it"
            )
        return ids

    def add(self, node: Node) -> None:
        """Append a turn.

        Raises:
            ContractError: its index or its parent is out of order.
        """
        if node.index != len(self._nodes) or (
            node.parent is not None and not 0 <= node.parent < node.index
        ):
            raise ContractError(
                f"session {self._session_id}: turn {node.index} with parent {node.parent} cannot follow "
                f"{len(self._nodes)} turns; turns are numbered from 0 without gaps, parents first"
            )
        self._nodes.append(node)
        self._by_key.setdefault(node.key, []).append(node)

    def segments(self) -> tuple[Segment, ...]:
        """Return one segment per branch, in the order the branches opened."""
        owner: list[int] = []
        tips: list[Node] = []
        origins: list[int | None] = []
        for node in self._nodes:
            grown_from = None if node.parent is None else owner[node.parent]
            if grown_from is not None and tips[grown_from].index == node.parent:
                tips[grown_from] = node
                owner.append(grown_from)
                continue
            if grown_from is None and owner:
                # A rewritten history shares no turn with what it replaces: it grew out of the last one.
                grown_from = owner[-1]
            owner.append(len(tips))
            tips.append(node)
            origins.append(grown_from)
        return tuple(
            self._segment(tip, order=order, parent=parent, owner=owner)
            for order, (tip, parent) in enumerate(zip(tips, origins, strict=True))
        )

    def _segment(
        self, tip: Node, *, order: int, parent: int | None, owner: Sequence[int]
    ) -> Segment:
        is_sampled: list[bool] = []
        train_mask: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        kept: list[tuple[int, ...]] = []
        for node in self._path(tip):
            num_context, num_sampled = len(node.context_ids), len(node.sampled_ids)
            is_sampled += [False] * num_context + [True] * num_sampled
            train_mask += [False] * num_context + [owner[node.index] == order] * num_sampled
            logprobs += [0.0] * num_context + node.logprobs.tolist()
            kept += [()] * num_context + list(node.kept_ids or [()] * num_sampled)
            versions += [NOT_SAMPLED] * num_context
            for version, length in node.version_runs:
                versions += [version] * length
        return Segment(
            token_ids=tuple(self.ids(tip)),
            is_sampled=tuple(is_sampled),
            train_mask=tuple(train_mask),
            behaviour_logprobs=tuple(logprobs),
            policy_versions=tuple(versions),
            kept_ids=tuple(kept) if any(kept) else None,
            order=order,
            parent=parent,
        )

    def _path(self, node: Node | None) -> list[Node]:
        path: list[Node] = []
        while node is not None:
            path.append(node)
            node = None if node.parent is None else self._nodes[node.parent]
        path.reverse()
        return path


def _same_call_ids(stored: Message, echoed: Message) -> bool:
    return [c.id for c in stored.tool_calls] == [c.id for c in echoed.tool_calls]
