"""Consistent hashing: which engine a session belongs to, decided by both their names alone.

Each place owns many points of a circle; a key belongs to the place of the first point behind its own hash.
When a place goes, its keys go to the places of the points that follow, and no other key moves. When it
comes back, the same keys come back.

No kept library has bounded loads (they are decided by the caller here: it takes the first place of ``walk``
that has room) and digests that are the same in every process, which Python's ``hash`` is not.

Source: Karger et al., "Consistent hashing and random trees", STOC 1997.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Place = TypeVar("Place", bound=Hashable)


class HashRing(Generic[Place]):
    """A circle of hashed points, several per place."""

    def __init__(self, points_per_place: int = 128) -> None:
        """Start empty.

        Args:
            points_per_place: more points spread keys more evenly (the standard deviation of the share of a
                place is about 1 / sqrt(points)) and make ``add`` and ``remove`` slower.
        """
        self._num_points = points_per_place
        self._points: list[tuple[int, str]] = []
        """(position, name), ascending; two places may even share a position."""
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, name: str, place: Place) -> None:
        """Give a place its points; a place that is there already is left alone."""
        if name not in self._places:
            self._places[name] = place
            for point in self._points_of(name):
                insort(self._points, point)

    def remove(self, name: str) -> None:
        """Take a place's points away; a place that is not there is fine."""
        if self._places.pop(name, None) is not None:
            self._points = [point for point in self._points if point[1] != name]

    def walk(self, key: str) -> Iterator[Place]:
        """Yield every place once, in the order in which ``key`` meets them."""
        start = bisect_left(self._points, (_position(key), ""))
        seen: set[str] = set()
        for offset in range(len(self._points)):
            _, name = self._points[(start + offset) % len(self._points)]
            if name not in seen:
                seen.add(name)
                yield self._places[name]
                if len(seen) == len(self._places):
                    return

    def _points_of(self, name: str) -> list[tuple[int, str]]:
        return [(_position(f"{name}#{index}"), name) for index in range(self._num_points)]


def _position(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
