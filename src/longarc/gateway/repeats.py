"""Which turn answered a request that comes again.

A request is known by its idempotency key for as long as the session lives, restarts included; by its body
for a while, because a client that lost the answer sends it again at once and one that did not may ask the
same again on purpose.
"""

import hashlib
from collections import OrderedDict

from longarc.errors import ConfigError
from longarc.gateway.budget import Stopwatch
from longarc.gateway.tree import Node
from longarc.gateway.turn_options import TurnOptions

_NUM_BODIES = 32
"""Newest bodies that are remembered."""


def request_digest(options: TurnOptions, *, body: bool = True) -> bytes | None:
    """Return what identifies a request: its idempotency key or, where ``body`` says so, its body; None without."""
    if options.idempotency_key is not None:
        key = options.idempotency_key.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(key, digest_size=16, person=b"key").digest()
    return options.body_digest if body else None


class Repeats:
    """The answered requests of one session, by what identifies them."""

    def __init__(self, window_s: float | None, stopwatch: Stopwatch) -> None:
        self._window_s = window_s
        self._stopwatch = stopwatch
        self._by_request: dict[bytes, int] = {}
        self._by_body: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def joins(self, options: TurnOptions) -> bool:
        """Whether a request is the same as one with its digest that runs."""
        return options.is_retry or options.idempotency_key is not None or self._window_s is not None

    def add(self, node: Node) -> None:
        """Remember the request of a turn."""
        if node.request:
            self._by_request[node.request] = node.index
        if node.body:
            self._by_body.pop(node.body, None)
            self._by_body[node.body] = (node.index, self._stopwatch.elapsed_s())
            while len(self._by_body) > _NUM_BODIES:
                self._by_body.popitem(last=False)

    def find(self, options: TurnOptions) -> int | None:
        """Return the index of the turn that answered the same request."""
        if options.idempotency_key is not None:
            return self._by_request.get(request_digest(options, body=False) or b"")
        found = self._by_body.get(options.body_digest or b"")
        if found is None:
            return None
        index, answered_at_s = found
        if options.is_retry:
            return index
        if not self._window_s or self._stopwatch.elapsed_s() - answered_at_s > self._window_s:
            return None
        return index

    @staticmethod
    def check_body(body: bytes | None, options: TurnOptions) -> None:
        """Refuse an idempotency key that another request has, which was answered or runs.

        Args:
            body: digest of that request.
            options: of this one.

        Raises:
            ConfigError: the bodies differ.
        """
        is_other = body and options.body_digest and body != options.body_digest
        if options.idempotency_key is not None and is_other:
            raise ConfigError(
                f"the idempotency key {options.idempotency_key[:80]!r} belongs to another request of "
                f"this session; send a key of its own with each"
            )
