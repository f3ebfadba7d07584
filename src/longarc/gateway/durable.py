"""Sessions that outlive their process: keys minted for rollouts, trees brought back from turn files.

A session is read from its file when it is first asked for, so a restart takes no time for those that nobody
comes back to. Keys are known by their digests alone; a revoked session leaves the memory, and its segments
are read from its file.
"""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from longarc.errors import ConfigError, LongArcError, ResourceError
from longarc.gateway.budget import SessionBudget
from longarc.gateway.core import Gateway
from longarc.gateway.recorded import recorded
from longarc.gateway.session import GatewaySession
from longarc.gateway.turn_files import SessionHead, TurnFiles, check_session_id
from longarc.gateway.wire import WireError, as_wire, not_found, unauthorized
from longarc.records.outcome import Outcome
from longarc.records.sampling import Sampling
from longarc.records.segment import Segment
from longarc.records.trajectory import Trajectory

STAGE = "gateway"
"""What trajectories of a gateway alone call their stage."""
Read = TypeVar("Read")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What a session is opened with."""

    sampling: Sampling
    thinking: bool
    max_context_tokens: int
    budget: SessionBudget = field(default_factory=SessionBudget)


@dataclass(slots=True)
class _Entry:
    head: SessionHead
    is_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """What is told of a session."""

    session_id: str
    is_open: bool
    num_turns: int | None
    """Turns answered; None while the session is on disk alone."""


class DurableSessions:
    """The sessions of a gateway and its directory; satisfies ``Access``."""

    def __init__(self, files: TurnFiles, gateway: Gateway) -> None:
        """Bring back what the directory holds.

        Args:
            files: where turns are; the gateway's turn log has to be its ``append``.
            gateway: opens sessions.

        Raises:
            ContractError: a file is damaged or of another version.
        """
        self._files = files
        self._gateway = gateway
        self._entries = {
            head.session_id: _Entry(head, is_closed) for head, is_closed in files.heads()
        }
        self._by_digest = {
            bytes.fromhex(entry.head.key_sha256): entry
            for entry in self._entries.values()
            if not entry.is_closed
        }

    @property
    def num_open(self) -> int:
        """Sessions whose key is not revoked."""
        return len(self._by_digest)

    def open(self, session_id: str | None, spec: SessionSpec) -> tuple[str, str]:
        """Open a session; return its id and its key, which is told this once.

        Args:
            session_id: a name that was never used in this directory; None makes one up.
            spec: what it is opened with.

        Raises:
            ConfigError: the name is taken or cannot be one, or the context holds no turn.
            ResourceError: the disk is full.
        """
        name = session_id if session_id is not None else f"s-{secrets.token_hex(8)}"
        check_session_id(name)
        if name in self._entries:
            raise ConfigError(
                f"session {name!r} exists already; choose another session_id, or delete it first"
            )
        key = secrets.token_urlsafe(32)
        head = SessionHead(
            session_id=name,
            key_sha256=_digest(key).hex(),
            sampling=spec.sampling,
            thinking=spec.thinking,
            max_context_tokens=spec.max_context_tokens,
            budget=spec.budget,
        )
        session = self._open(head)
        try:
            self._files.create(head)
        except BaseException:
            self._gateway.drop(session)
            raise
        entry = _Entry(head, is_closed=False)
        self._entries[name] = self._by_digest[_digest(key)] = entry
        return name, key

    def session(self, *, path_key: str | None, bearer: str | None) -> GatewaySession:
        """Return the session of a key; see ``Access.session``. The path wins over the header."""
        key = path_key or bearer
        if key is None:
            raise unauthorized(
                "no key: send the session's key as bearer token or in the path /s/KEY/v1"
            )
        shown = _digest(key)
        entry = self._by_digest.get(shown)
        # A digest tells nothing of its key, and is compared in constant time all the same.
        if entry is None or not hmac.compare_digest(shown.hex(), entry.head.key_sha256):
            if path_key:
                raise not_found(
                    "no such session: it ended, or the path /s/KEY/v1 holds a wrong key"
                )
            raise unauthorized("the key belongs to no open session: it ended, or the key is wrong")
        try:
            return self._resident(entry)
        except ResourceError as error:  # too many open files, say: not the session's own fault
            raise as_wire(error) from error
        except LongArcError as error:
            _log.exception("session %s cannot be restored", entry.head.session_id)
            raise WireError(500, str(error), kind="server_error", code="session_damaged") from error

    async def revoke(self, session_id: str) -> None:
        """End a session: its key opens nothing any more, its turns stay. Revoking twice is allowed.

        Raises:
            WireError: 404, there is no such session.
            ResourceError: the disk is full; the session goes on.
        """
        entry = self._entry(session_id)
        if entry.is_closed:
            return
        self._files.mark_closed(session_id)
        entry.is_closed = True
        self._by_digest.pop(bytes.fromhex(entry.head.key_sha256))
        session = self._gateway.find(session_id)
        if session is not None:
            await session.close()

    async def delete(self, session_id: str) -> None:
        """Revoke a session and delete its turns; see ``revoke``."""
        await self.revoke(session_id)
        del self._entries[session_id]
        self._files.remove(session_id)

    def segments(self, session_id: str) -> tuple[Segment, ...]:
        """Return what the session has so far, as training segments.

        Raises:
            WireError: 404, there is no such session.
            ContractError: its file is damaged.
        """
        return self._read(session_id, GatewaySession.segments)

    def trajectory(self, session_id: str) -> Trajectory:
        """Return all that the session has so far: conversation, turns and segments. Its start is not known.

        Raises:
            WireError: 404, there is no such session.
            ContractError: its file is damaged.
        """
        return self._read(session_id, _recorded)

    def _read(self, session_id: str, what: Callable[[GatewaySession], Read]) -> Read:
        """Return something of a session; one that is revoked is brought back for the while."""
        entry = self._entry(session_id)
        if not entry.is_closed:
            return what(self._resident(entry))
        session = self._restored(entry)
        try:
            return what(session)
        finally:
            self._gateway.drop(session)

    def states(self) -> Iterator[SessionState]:
        """Yield all sessions, in the order of their names."""
        for name, entry in sorted(self._entries.items()):
            session = self._gateway.find(name)
            yield SessionState(
                session_id=name,
                is_open=not entry.is_closed,
                num_turns=None if session is None else session.num_turns,
            )

    def _entry(self, session_id: str) -> _Entry:
        entry = self._entries.get(session_id)
        if entry is None:
            raise not_found(f"there is no session {session_id[:80]!r} in this gateway")
        return entry

    def _resident(self, entry: _Entry) -> GatewaySession:
        return self._gateway.find(entry.head.session_id) or self._restored(entry)

    def _restored(self, entry: _Entry) -> GatewaySession:
        head = entry.head
        payloads: Sequence[bytes] = self._files.payloads(head.session_id)
        return self._gateway.restore(
            head.session_id,
            payloads,
            sampling=head.sampling,
            thinking=head.thinking,
            max_context_tokens=head.max_context_tokens,
            budget=head.budget,
        )

    def _open(self, head: SessionHead) -> GatewaySession:
        return self._gateway.open(
            head.session_id,
            sampling=head.sampling,
            thinking=head.thinking,
            max_context_tokens=head.max_context_tokens,
            budget=head.budget,
        )


def _recorded(session: GatewaySession) -> Trajectory:
    turns = session.turns()
    return recorded(
        session,
        stage=STAGE,
        outcome=Outcome.COMPLETED,
        started_at_s=0.0,
        duration_s=turns[-1].elapsed_s if turns else 0.0,
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
