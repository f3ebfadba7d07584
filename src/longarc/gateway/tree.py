"""The tree of one session: every completion, each below the turn whose ids it continued.

::

    turn 0: prompt p0, sampled c0
     +-- turn 1: tail t1, sampled c1           segment 0 = p0 c0 t1 c1        trains c0, c1
     |
     +-- turn 2: edited tail t2, sampled c2    segment 1 = p0 c0 t2 c2        trains c2 only
    turn 3: rewritten prompt p3, sampled c3    segment 2 = p3 c3              trains c3

A node holds only what it added. A segment is a path from a root to a tip; ``branches`` makes them.
"""

import hashlib
import pickle
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from longarc.errors import ContractError
from longarc.gateway.asked import Asked
from longarc.records.constraint import Constraint
from longarc.records.message import Message, Role
from longarc.records.sampling import FinishReason

_NODE_BYTES = 1500
"""Of one turn without its text and its ids, about."""


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
    constrained: tuple[Constraint, tuple[int, ...]] | None = None
    """What the answer had to follow, and the ids that could end it; None where it was free."""
    routing: tuple[bytes, ...] = ()
    """What tokens were routed to: of the parent's last one, of the context, and of the sampled ones but the last, which
    a continuation has. Empty where nobody asked."""
    serial: int = -1
    """Number of the request, of which seeds and call ids are made; -1 where it is the index."""
    request: bytes = b""
    """Digest of the idempotency key; empty where there was none."""
    body: bytes = b""
    """Digest of the whole request; empty where nobody gave it."""
    asked: Asked | None = None
    """What is kept of the request of a client that owns its context."""


def id_array(ids: Sequence[int] = ()) -> "array[int]":
    """Return ids in four bytes each."""
    return array("I", ids)


@dataclass(frozen=True, slots=True)
class _Tip:
    """What is known of all ids up to the newest turn, which most requests continue."""

    node: Node
    digest: "hashlib.blake2b"
    checksum: int
    """CRC-32, five times as fast as the digest: of a long conversation the digest is most of a request."""


class SessionTree:
    """All turns of one session."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._nodes: list[Node] = []
        self._by_key: dict[bytes, list[Node]] = {}
        self._tip: _Tip | None = None
        self._packed = b""
        self._num_nodes = 0
        self._num_bytes = 0

    @property
    def nodes(self) -> Sequence[Node]:
        """The turns, in the order they were answered."""
        if self._packed:
            self._unpack()
        return self._nodes

    @property
    def num_nodes(self) -> int:
        """How many turns there are; does not unpack a tree that rests."""
        return self._num_nodes

    @property
    def num_bytes(self) -> int:
        """Memory that the turns take, about; 0 while they rest [bytes]."""
        return 0 if self._packed else self._num_bytes

    def rest(self) -> None:
        """Pack the turns, which takes a third of the memory; the next use unpacks them."""
        if self._nodes:
            # Of our own objects, in our own memory: nothing here is read from outside.
            self._packed = zlib.compress(pickle.dumps(self._nodes, pickle.HIGHEST_PROTOCOL), 1)
            self._nodes, self._by_key = [], {}
            self._tip = None

    def _unpack(self) -> None:
        nodes: list[Node] = pickle.loads(zlib.decompress(self._packed))
        self._packed = b""
        self._nodes = nodes
        for node in nodes:
            self._by_key.setdefault(node.key, []).append(node)

    def match(self, messages: Sequence[Message], keys: Sequence[bytes]) -> tuple[Node | None, int]:
        """Return the deepest stored turn that a conversation continues, and how many messages it covers."""
        if self._packed:
            self._unpack()
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
        for step in self.path(node):
            reasoning = messages[step.num_messages - 1].reasoning
            if reasoning and reasoning != step.message.reasoning:
                return False
        return True

    def as_answered(
        self, messages: Sequence[Message], keys: Sequence[bytes], node: Node
    ) -> list[Message]:
        """Return a conversation with its answers as they were given, reasoning that the client left out included.

        Args:
            messages: the conversation.
            keys: their identities.
            node: the stored turn that it continues, whose own path decides where answers differ in reasoning alone.
        """
        answered = list(messages)
        on_path = {step.num_messages - 1: step for step in self.path(node)}
        for position, message in enumerate(messages):
            if message.role is Role.ASSISTANT and not message.reasoning:
                known = self._by_key.get(keys[position])
                if step := on_path.get(position) or (known[-1] if known else None):
                    answered[position] = step.message
        return answered

    def has_reasoning(self, node: Node | None) -> bool:
        """Whether any turn from the root to this one holds reasoning."""
        return any(step.message.reasoning for step in self.path(node))

    def ids(self, node: Node | None) -> "array[int]":
        """Return all ids from the root to the end of a turn; see ``stored``."""
        return self.stored(node)[0]

    def stored(self, node: Node | None) -> "tuple[array[int], hashlib.blake2b]":
        """Return all ids from the root to the end of a turn, and their digest, to be continued.

        Raises:
            ContractError: they are not the ids that the engine saw when the turn was sampled.
        """
        ids = id_array()
        for step in self.path(node):
            ids += step.context_ids
            ids += step.sampled_ids
        if self._tip is not None and node is self._tip.node:
            # Hashed when they were added: what may have changed in this memory since, a checksum finds.
            digest = self._tip.digest.copy()
            is_as_seen = zlib.crc32(ids) == self._tip.checksum
        else:
            digest = hashlib.blake2b(ids, digest_size=16)
            is_as_seen = node is None or digest.digest() == node.ids_digest
        if node is not None and not is_as_seen:
            digest = hashlib.blake2b(ids, digest_size=16)
            raise ContractError(
                f"session {self._session_id}: the {len(ids)} ids stored up to turn {node.index} are not "
                f"those that the engine saw (digest {digest.hexdigest()}, recorded "
                f"{node.ids_digest.hex()}). The session's tree or its turn log was altered: keep the "
                f"log and report it"
            )
        return ids, digest

    def add(self, node: Node, digest: "hashlib.blake2b | None" = None) -> None:
        """Append a turn.

        Args:
            node: the turn.
            digest: of all ids up to its end, to be continued by the next; None where nobody has it.

        Raises:
            ContractError: its index or its parent is out of order.
        """
        if self._packed:
            self._unpack()
        if node.index != len(self._nodes) or (
            node.parent is not None and not 0 <= node.parent < node.index
        ):
            raise ContractError(
                f"session {self._session_id}: turn {node.index} with parent {node.parent} cannot follow "
                f"{len(self._nodes)} turns; turns are numbered from 0 without gaps, parents first"
            )
        self._tip = None if digest is None else _Tip(node, digest, self._checksum(node))
        self._nodes.append(node)
        self._num_nodes += 1
        self._num_bytes += _num_bytes(node)
        self._by_key.setdefault(node.key, []).append(node)

    def _checksum(self, node: Node) -> int:
        parent = None if node.parent is None else self._nodes[node.parent]
        if self._tip is not None and parent is self._tip.node:
            checksum, path = self._tip.checksum, [node]
        else:
            checksum, path = 0, [*self.path(parent), node]
        for step in path:
            checksum = zlib.crc32(step.sampled_ids, zlib.crc32(step.context_ids, checksum))
        return checksum

    def path(self, node: Node | None) -> list[Node]:
        """Return the turns from the root to a turn."""
        path: list[Node] = []
        nodes = self.nodes
        while node is not None:
            path.append(node)
            node = None if node.parent is None else nodes[node.parent]
        path.reverse()
        return path


def _num_bytes(node: Node) -> int:
    num_ids = len(node.context_ids) + len(node.sampled_ids)
    num_chars = len(node.message.content) + len(node.message.reasoning or "")
    if node.asked is not None:
        num_chars += sum(len(message.content) for message in node.asked.said)
    num_routing = sum(map(len, node.routing))
    return _NODE_BYTES + 4 * num_ids + 8 * len(node.sampled_ids) + num_chars + num_routing


def _same_call_ids(stored: Message, echoed: Message) -> bool:
    return [c.id for c in stored.tool_calls] == [c.id for c in echoed.tool_calls]
