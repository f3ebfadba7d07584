"""Text that ends a completion, found in the bytes of the tokens as they are sampled."""

from collections.abc import Callable, Sequence

TokenBytes = Callable[[int], bytes]
"""Gives the bytes that a token stands for, a control token as its text."""


class StopStrings:
    """Watches one completion. A match may begin and end anywhere in a token, and span any number of them."""

    def __init__(self, strings: Sequence[str], token_bytes: TokenBytes) -> None:
        self._stops = [string.encode() for string in strings]
        self._token_bytes = token_bytes
        self._num_kept = max(map(len, self._stops)) - 1
        self._tail = b""

    def is_completed_by(self, token_id: int) -> bool:
        """Take in the next token; say whether a stop string ends in it."""
        text = self._tail + self._token_bytes(token_id)
        # What came before the token holds no whole one, or the completion would have ended there.
        is_completed = any(stop in text for stop in self._stops)
        self._tail = text[max(0, len(text) - self._num_kept) :] if self._num_kept else b""
        return is_completed
