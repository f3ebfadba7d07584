"""The pages of the cache: who uses them, and what they hold, by content.

::

    free --take--> used --drop--> cached --take, when nothing is free--> used by another
                    ^------hold------'

A page in use or cached can be found by what it holds. A full page has a key, the digest of its tokens and of the key
of the page before it; the first one follows the salt, which names the weights, so that rows of old weights have
other keys than any prompt looks for. A page that is not full is found through the key of what comes before it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longarc.models.cache import NO_PAGE

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest beginning of some tokens that is in the cache."""

    length: int
    """Tokens of it."""
    pages: tuple[int, ...]
    """Full pages, which can be shared."""
    key: bytes | None
    """Of the last of them; the salt's where there is none. None where nobody may find what follows."""
    partial_page: int = NO_PAGE
    """Page that holds what follows, up to ``length``, and then something else or nothing; it can be copied."""


class PagePool:
    """All pages of one cache."""

    def __init__(self, num_pages: int, page_tokens: int, *, salt: str) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self._free = dict.fromkeys(range(num_pages - 1, -1, -1))
        self._cached: dict[int, None] = {}
        """Pages that can be found and nobody uses, the least recently used first, and a page before those it follows."""
        self._num_users = [0] * num_pages
        self._tokens = np.zeros((num_pages, page_tokens), dtype=np.int64)
        self._num_held = np.zeros(num_pages, dtype=np.int64)
        self._parent: list[bytes | None] = [None] * num_pages
        """Key of what comes before a page; None where the page cannot be found."""
        self._page_of: dict[bytes, int] = {}
        self._followers: dict[bytes, dict[int, None]] = {}
        """Pages that can be found, by the key of what comes before them, in the order in which they came."""
        self.root = b""
        """What the first page of a sequence follows."""
        self.renew(salt)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody uses and that hold what may be of use again."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages of running sequences."""
        return self.num_pages - self.num_available

    def take(self, count: int, *, after: int = NO_PAGE) -> list[int]:
        """Take empty pages, those of the least recently used prefixes when no others are left.

        The caller sees to it that ``num_available`` is enough. Pages that follow each other in memory are preferred:
        a processor reads across their border faster than from one place to another.

        Args:
            count: how many.
            after: page of the sequence that the first one follows.
        """
        while len(self._free) < count:
            oldest = next(iter(self._cached))
            del self._cached[oldest]
            self._empty(oldest)
        pages = []
        for _ in range(count):
            after = after + 1 if after + 1 in self._free else next(reversed(self._free))
            del self._free[after]
            self._num_users[after] = 1
            pages.append(after)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Use pages that were found."""
        for page in pages:
            self._num_users[page] += 1
            self._cached.pop(page, None)

    def drop(self, pages: Sequence[int]) -> None:
        """Use pages no longer; what can be found stays until its room is needed.

        Args:
            pages: of one sequence, in its order.
        """
        # The last first: what follows a page is of no use without it, and so has to go before it.
        for page in reversed(pages):
            self._num_users[page] -= 1
            if self._num_users[page]:
                continue
            if self._parent[page] is None or self._is_copy(page):
                self._empty(page)
            else:
                self._cached[page] = None

    def find(self, tokens: Ids) -> Prefix:
        """Return the longest beginning of ``tokens`` that is in the cache."""
        size = self.page_tokens
        key, pages = self.root, []
        for start in range(0, len(tokens) - size + 1, size):
            next_key = _key(key, tokens[start : start + size])
            page = self._page_of.get(next_key)
            if page is None:
                break
            key = next_key
            pages.append(page)
        length = len(pages) * size
        followers = self._followers.get(key)
        rest = tokens[length : length + size]
        if not followers or not len(rest):
            return Prefix(length, tuple(pages), key)
        candidates = np.fromiter(followers, dtype=np.int64)
        is_different = self._tokens[candidates, : len(rest)] != rest
        shared = np.where(is_different.any(axis=1), is_different.argmax(axis=1), len(rest))
        shared = np.minimum(shared, self._num_held[candidates])
        best = int(shared.argmax())
        if not shared[best]:
            return Prefix(length, tuple(pages), key)
        return Prefix(length + int(shared[best]), tuple(pages), key, int(candidates[best]))

    def write(self, page: int, tokens: Sequence[int] | Ids, parent: bytes | None) -> bytes | None:
        """Note that a page in use holds more tokens.

        Args:
            page: has room for them.
            tokens: follow those that it holds.
            parent: key of what comes before the page; None where nobody may find it.

        Returns:
            the key of the page if that is full now and can be found.
        """
        start = int(self._num_held[page])
        stop = start + len(tokens)
        self._tokens[page, start:stop] = tokens
        self._num_held[page] = stop
        if parent is None:
            return None
        if self._parent[page] is None:
            self._parent[page] = parent
            self._followers.setdefault(parent, {})[page] = None
        if stop < self.page_tokens:
            return None
        key = _key(parent, self._tokens[page])
        self._page_of.setdefault(key, page)
        return key

    def can_go_on(self, page: int, tokens: Ids) -> bool:
        """Whether nobody uses a page and a sequence with these tokens in it loses nothing that the page holds."""
        held = self._tokens[page, : self._num_held[page]]
        return page in self._cached and np.array_equal(held, tokens[: len(held)])

    def cut(self, page: int, count: int) -> None:
        """Keep the first ``count`` tokens of a page, which its one user is going to fill again."""
        parent = self._parent[page]
        if parent is not None and self._num_held[page] == self.page_tokens:
            key = _key(parent, self._tokens[page])
            if self._page_of.get(key) == page:
                del self._page_of[key]
        self._num_held[page] = count

    def held(self, pages: Sequence[int], length: int) -> Ids:
        """Return the first ``length`` tokens that these pages of one sequence hold."""
        tokens: Ids = self._tokens[list(pages)].reshape(-1)[:length]
        return tokens

    def forget(self, pages: Sequence[int]) -> None:
        """Let nobody find these pages any more; who uses them goes on."""
        for page in pages:
            parent = self._parent[page]
            if parent is None:
                continue
            self._parent[page] = None
            del self._followers[parent][page]
            if not self._followers[parent]:
                del self._followers[parent]
            if self._num_held[page] == self.page_tokens:
                key = _key(parent, self._tokens[page])
                if self._page_of.get(key) == page:
                    del self._page_of[key]
            if page in self._cached:
                del self._cached[page]
                self._empty(page)

    def renew(self, salt: str) -> None:
        """Let nobody find anything that is in the cache now.

        Args:
            salt: names the weights that compute from now on.
        """
        self.root = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self._parent = [None] * self.num_pages
        self._page_of.clear()
        self._followers.clear()
        cached = list(self._cached)
        self._cached.clear()
        for page in cached:
            self._empty(page)

    def _is_copy(self, page: int) -> bool:
        """Whether another page is found in place of this full one."""
        parent = self._parent[page]
        if parent is None or self._num_held[page] < self.page_tokens:
            return False
        return self._page_of.get(_key(parent, self._tokens[page])) != page

    def _empty(self, page: int) -> None:
        self.forget([page])
        self._num_held[page] = 0
        self._free[page] = None


def _key(parent: bytes, tokens: Ids) -> bytes:
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()
