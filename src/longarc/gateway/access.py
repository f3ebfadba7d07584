"""Who may talk to which session.

A key is a capability: whoever holds it talks to its session, as the bearer token or in the path
(``/s/{key}/v1``), which every client can be given as its base URL. Keys are looked up by digest and
compared in constant time, so response times say nothing about them.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Collection
from typing import Protocol

from longarc.errors import ConfigError
from longarc.gateway.session import GatewaySession
from longarc.gateway.wire import WireError, not_found, unauthorized


class Access(Protocol):
    """Turns what a request shows into a session."""

    def session(self, *, path_key: str | None, bearer: str | None) -> GatewaySession:
        """Return the session that a request may use.

        Args:
            path_key: the part of the path behind ``/s/``, if there is one.
            bearer: the bearer token or ``x-api-key``, if there is one.

        Raises:
            WireError: 401, 404 or 429.
        """
        ...


class RolloutAccess:
    """One unguessable key per rollout, minted when its session opens, revoked when it ends."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, tuple[str, GatewaySession]] = {}

    def admit(self, session: GatewaySession) -> str:
        """Mint the key of a session."""
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = (key, session)
        return key

    def revoke(self, key: str) -> None:
        """Forget a key; a key that is not known is fine."""
        self._sessions.pop(_digest(key), None)

    def session(self, *, path_key: str | None, bearer: str | None) -> GatewaySession:
        """Return the session of a key; see ``Access.session``. The path wins over the header."""
        key = path_key or bearer
        if key is None:
            raise unauthorized(
                "no key: send the session's key as bearer token or in the path /s/KEY/v1"
            )
        found = self._sessions.get(_digest(key))
        if found is None or not hmac.compare_digest(found[0].encode(), key.encode()):
            if path_key:
                raise not_found(
                    "no such session: it ended, or the path /s/KEY/v1 holds a wrong key"
                )
            raise unauthorized("the key belongs to no open session: it ended, or the key is wrong")
        return found[1]


class ServeAccess:
    """Fixed API keys for people; sessions are opened when they are first used.

    ``/v1`` is one session per key, ``/s/{name}/v1`` one session per key and name. The number of
    sessions is bounded by ``max_sessions``, because names come from clients.
    """

    def __init__(
        self,
        api_keys: Collection[str],
        open_session: Callable[[str], GatewaySession],
        *,
        max_sessions: int = 256,
    ) -> None:
        """Bind keys and the way to open a session.

        Args:
            api_keys: keys that are let in; not empty.
            open_session: gets a name that is unique per key and session, returns an open session.
            max_sessions: most sessions that may be open at once.

        Raises:
            ConfigError: there is no key, or an empty one.
        """
        if not api_keys or not all(api_keys):
            raise ConfigError("serving needs at least one API key, and no key may be empty")
        self._digests = [_digest(key) for key in api_keys]
        self._open_session = open_session
        self._max_sessions = max_sessions
        self._sessions: dict[tuple[bytes, str], GatewaySession] = {}

    def session(self, *, path_key: str | None, bearer: str | None) -> GatewaySession:
        """Return the session of a key and a name; see ``Access.session``."""
        if bearer is None:
            raise unauthorized("no key: send an API key as bearer token")
        shown = _digest(bearer)
        # Every key is compared, so the time does not tell which one came close.
        matches = [hmac.compare_digest(shown, known) for known in self._digests]
        if not any(matches):
            raise unauthorized("the API key is wrong")
        name = path_key or "default"
        session = self._sessions.get((shown, name))
        if session is not None and not session.is_closed:
            return session
        self._sessions = {key: s for key, s in self._sessions.items() if not s.is_closed}
        if len(self._sessions) >= self._max_sessions:
            raise WireError(
                429,
                f"session {name!r} does not exist and {self._max_sessions} are open, which is the "
                f"limit; use one of them or restart the server",
                code="too_many_sessions",
                kind="rate_limit_error",
                headers={"retry-after": "60"},
            )
        session = self._open_session(f"{shown.hex()[:8]}/{name}")
        self._sessions[shown, name] = session
        return session


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
