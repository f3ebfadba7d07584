"""Which engine serves a session: the one that holds its cache, unless that one is gone or was full.

A new session goes to the first place behind its hash that has room: no place gets more than
``load_factor`` times its share of the live sessions. A session stays where it is while it is live and its
place is there; one that was idle for long is forgotten, and its hash most likely leads it back.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018
(arXiv:1608.01350).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from longarc.engine.hash_ring import HashRing

Place = TypeVar("Place", bound=Hashable)


@dataclass(slots=True)
class _Session(Generic[Place]):
    place: Place
    seen_at_s: float


class Placement(Generic[Place]):
    """A table of live sessions over a hash ring. Not for several threads."""

    def __init__(
        self,
        *,
        load_factor: float,
        idle_s: float,
        clock: Callable[[], float],
        weight: Callable[[Place], float] = lambda _: 1.0,
    ) -> None:
        """Start without places.

        Args:
            load_factor: most sessions of a place over the mean; above 1.
            idle_s: a session that was not seen for this long counts no more [seconds].
            clock: time [seconds].
            weight: share of sessions that a place may take relative to the others, above 0; below 1 while
                it warms up.
        """
        self._load_factor = load_factor
        self._idle_s = idle_s
        self._clock = clock
        self._weight = weight
        self._ring: HashRing[Place] = HashRing()
        self._names: dict[Place, str] = {}
        self._sessions: OrderedDict[str, _Session[Place]] = OrderedDict()  # bounded by idle_s
        self._loads: dict[Place, int] = {}

    @property
    def places(self) -> Collection[Place]:
        """Where sessions can go."""
        return self._names.keys()

    def load(self, place: Place) -> int:
        """Return the live sessions of a place."""
        return self._loads.get(place, 0)

    def add(self, name: str, place: Place) -> None:
        """Let sessions go to ``place``; its name decides which."""
        self._ring.add(name, place)
        self._names[place] = name
        self._loads.setdefault(place, 0)

    def remove(self, place: Place) -> None:
        """Let no session go to ``place``; those that are there are placed anew when they are next seen."""
        name = self._names.pop(place, None)
        if name is None:
            return
        self._ring.remove(name)
        del self._loads[place]
        gone = [key for key, session in self._sessions.items() if session.place == place]
        for key in gone:
            del self._sessions[key]

    def touch(self, session_id: str) -> None:
        """A session shows that it is live; one that is not known is fine."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.seen_at_s = self._clock()
            self._sessions.move_to_end(session_id)

    def place(self, session_id: str, *, excluded: Collection[Place] = ()) -> Place | None:
        """Return where a session goes, and remember it.

        Args:
            session_id: the session.
            excluded: places that it must not go to this time.

        Returns:
            None where there is no place that is not excluded.
        """
        now_s = self._clock()
        self._forget_idle(now_s)
        session = self._sessions.get(session_id)
        if session is not None and session.place not in excluded:
            self.touch(session_id)
            return session.place
        if session is not None:
            self._drop(session_id)
        chosen = self._with_room(session_id, excluded)
        if chosen is not None:
            self._sessions[session_id] = _Session(chosen, now_s)
            self._loads[chosen] += 1
        return chosen

    def _with_room(self, session_id: str, excluded: Collection[Place]) -> Place | None:
        weights = {place: self._weight(place) for place in self._names if place not in excluded}
        scale = (1 + sum(map(self.load, weights))) / sum(weights.values()) if weights else 0.0
        for place in self._ring.walk(session_id):
            if place in weights:
                share = weights[place] * scale
                # At least the share itself, rounded up, so that somewhere there is always room.
                if self.load(place) < max(math.ceil(share), math.floor(self._load_factor * share)):
                    return place
        return None

    def _forget_idle(self, now_s: float) -> None:
        while self._sessions:
            session_id, session = next(iter(self._sessions.items()))
            if now_s - session.seen_at_s < self._idle_s:
                return
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        self._loads[self._sessions.pop(session_id).place] -= 1
