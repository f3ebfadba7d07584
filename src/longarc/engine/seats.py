"""Seats for running sequences: a place in the batch, the pages of its rows, and what of them is in the cache already.

A request that begins like an earlier one shares that one's full pages; of the page in which they part, it copies the
common rows, or goes on there if nobody uses it and nothing in it would be lost. Where layers keep a memory of all tokens instead of rows, nothing can be shared: a sequence that ended
keeps its seat and its pages as long as nobody needs them, and only what begins with all of it can go on there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longarc.engine.pages import Ids, PagePool, Prefix
from longarc.models.cache import NO_PAGE, PagedCache


@dataclass(slots=True, eq=False)
class Seat:
    """Where one running sequence keeps its rows."""

    index: int
    """Slot of the cache."""
    pages: list[int] = field(default_factory=list)
    length: int = 0
    """Tokens whose rows are in the pages."""
    key: bytes | None = None
    """Of what is in the full pages; None where some rows were computed by old weights, which nobody else may use."""


class SeatTable:
    """All seats of one cache, and its pages."""

    def __init__(self, cache: PagedCache, *, salt: str) -> None:
        self._cache = cache
        self._can_branch = cache.can_branch
        self.pages = PagePool(cache.shape.total_pages, cache.shape.page_tokens, salt=salt)
        self._idle = {index: Seat(index) for index in range(cache.shape.num_slots)}
        """Seats that nobody has, the least recently used first; they have pages only where nothing can be shared."""
        self._taken: dict[int, Seat] = {}

    def close(self) -> None:
        """Let go of the cache."""
        del self._cache

    @property
    def can_branch(self) -> bool:
        """Whether a sequence can go on from any position of another one."""
        return self._can_branch

    @property
    def num_kept(self) -> int:
        """Pages of sequences that ended and may go on."""
        # A list, because the engine's health is asked for while its worker gives seats back.
        return sum(len(seat.pages) for seat in list(self._idle.values()))

    @property
    def num_available(self) -> int:
        """Pages that running sequences can get."""
        return self.pages.num_available + self.num_kept

    def find(self, tokens: Ids) -> Prefix:
        """Return the longest beginning of ``tokens`` from which a sequence can go on.

        The last token is never part of it: its state has to be computed for the next logits.
        """
        tokens = tokens[:-1]
        if self._can_branch:
            return self.pages.find(tokens)
        seat = self._standing_in(tokens)
        return Prefix(0 if seat is None else seat.length, (), self.pages.root)

    def nothing(self) -> Prefix:
        """Return the prefix of a sequence that old weights compute: it finds nothing, and nobody finds its rows."""
        return Prefix(0, (), None)

    def take(self, tokens: Ids, prefix: Prefix, *, num_spare: int) -> Seat | None:
        """Give a sequence a seat, with pages for its tokens and the one that follows.

        Args:
            tokens: of the sequence.
            prefix: what ``find`` said of them.
            num_spare: pages that have to be left for others.

        Returns:
            None where there are not as many pages, or no seat.
        """
        is_unshared = self._can_branch or prefix.key is None
        standing = None if is_unshared else self._standing_in(tokens[:-1])
        num_kept = 0 if standing is None else len(standing.pages)
        reopened, source = self._partial(tokens, prefix)
        shared = [*prefix.pages, *reopened]
        num_new = self._num_pages(len(tokens) + 1) - len(shared) - num_kept
        num_wanted = num_new + num_kept + num_spare
        # Held first, or they could be taken for what is new.
        self.pages.hold([*shared, *source])
        if source and self.num_available < num_wanted:
            # The page to copy from may be the last one there is.
            self.pages.drop(source)
            source = []
        if not self._idle or self.num_available < num_wanted:
            self.pages.drop([*shared, *source])
            return None
        seat = standing or self._least_missed()
        self._taken[seat.index] = self._idle.pop(seat.index)
        if standing is None:
            self._empty(seat)
            seat.pages, seat.key = list(shared), prefix.key
            seat.length = len(prefix.pages) * self.pages.page_tokens
        self._add_pages(seat, num_new)
        self._cache.give_pages(seat.index, seat.pages)
        num_common = prefix.length - seat.length
        if reopened:
            self.pages.cut(reopened[0], num_common)
            seat.length = prefix.length
        if source:
            self._cache.copy_rows(source[0], seat.pages[len(shared)], num_common)
            self.write(seat, tokens[seat.length : prefix.length])
            self.pages.drop(source)
        return seat

    def _partial(self, tokens: Ids, prefix: Prefix) -> tuple[list[int], list[int]]:
        """Return the page in which a sequence goes on, or else the page whose beginning it copies."""
        page = prefix.partial_page
        if page == NO_PAGE:
            return [], []
        inside = tokens[len(prefix.pages) * self.pages.page_tokens :]
        return ([page], []) if self.pages.can_go_on(page, inside) else ([], [page])

    def num_lacking(self, seat: Seat, length: int) -> int:
        """Return how many more pages a sequence of ``length`` tokens needs."""
        return max(0, self._num_pages(length) - len(seat.pages))

    def grow(self, seat: Seat, length: int) -> bool:
        """Make room for ``length`` tokens in all; return whether there are enough pages."""
        count = self.num_lacking(seat, length)
        if count > self.num_available:
            return False
        if count:
            first = len(seat.pages)
            self._add_pages(seat, count)
            self._cache.give_pages(seat.index, seat.pages[first:], first=first)
        return True

    def write(self, seat: Seat, tokens: Sequence[int] | Ids) -> None:
        """Note that the rows of these tokens, which follow what is there, are in the cache now."""
        size = self.pages.page_tokens
        done = 0
        while done < len(tokens):
            place = seat.length % size
            some = tokens[done : done + size - place]
            page = seat.pages[seat.length // size]
            key = self.pages.write(page, some, seat.key if self._can_branch else None)
            if key is not None:
                seat.key = key
            seat.length += len(some)
            done += len(some)

    def release(self, seat: Seat, *, is_sound: bool = True) -> None:
        """Give a seat back.

        Args:
            seat: of a sequence that ended or has to wait.
            is_sound: whether its rows may serve others.
        """
        self._idle[seat.index] = self._taken.pop(seat.index)
        if not is_sound:
            self.pages.forget(seat.pages)
        if self._can_branch or seat.key is None or not is_sound:
            self._empty(seat)

    def renew(self, salt: str) -> None:
        """Let nothing that was computed so far serve a new request.

        Args:
            salt: names the weights that compute from now on.
        """
        self.pages.renew(salt)
        for seat in self._idle.values():
            self._empty(seat)
        for seat in self._taken.values():
            seat.key = None

    def _num_pages(self, length: int) -> int:
        return -(-length // self.pages.page_tokens)

    def _standing_in(self, tokens: Ids) -> Seat | None:
        """Return the idle seat whose whole sequence begins ``tokens``, the longest one."""
        best: Seat | None = None
        for seat in self._idle.values():
            if (0 if best is None else best.length) < seat.length <= len(tokens):
                held = self.pages.held(seat.pages, seat.length)
                if np.array_equal(held, tokens[: seat.length]):
                    best = seat
        return best

    def _least_missed(self) -> Seat:
        empty = next((seat for seat in self._idle.values() if not seat.length), None)
        return empty or next(iter(self._idle.values()))

    def _add_pages(self, seat: Seat, count: int) -> None:
        """Add pages, if need be those of sequences that ended."""
        while self.pages.num_available < count:
            self._empty(next(idle for idle in self._idle.values() if idle.pages))
        last = seat.pages[-1] if seat.pages else NO_PAGE
        seat.pages.extend(self.pages.take(count, after=last))

    def _empty(self, seat: Seat) -> None:
        self.pages.drop(seat.pages)
        seat.pages, seat.length, seat.key = [], 0, None
