"""Text into documents of token ids, with a cursor from which reading goes on exactly where it stopped.

::

    texts ──encode──▶ ids of text 0 | sep | ids of text 1 | sep | ...   cut every ``length`` ids
                                                    ^ cursor = (text index, offset in its ids)

Sources give random access (``text(index)``), so that a resume encodes one text and skips none.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from longarc.errors import ConfigError, ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a supervised step trains on. Both fields have one length L."""

    token_ids: tuple[int, ...]
    train_mask: tuple[bool, ...]
    """True where the token is trained on."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.train_mask):
            raise ContractError(
                f"a document has {len(self.token_ids)} ids but {len(self.train_mask)} mask entries"
            )


class TextSource(Protocol):
    """Endless text by position."""

    def text(self, index: int) -> str:
        """Return text number ``index`` >= 0, always the same."""
        ...


class ShuffledTexts:
    """A finite list of texts, again and again, in a new order every epoch."""

    def __init__(self, texts: Sequence[str], *, seed: int) -> None:
        if not texts:
            raise ConfigError("there are no texts to read")
        self._texts = texts
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def text(self, index: int) -> str:
        """Return the text at this position of the endless sequence."""
        epoch, position = divmod(index, len(self._texts))
        if epoch != self._epoch:
            self._order = list(range(len(self._texts)))
            random.Random(f"texts/{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._texts[self._order[position]]


class MixedTexts:
    """Two sources in a fixed proportion, spread evenly: the second gets ``share_frac`` of the texts."""

    def __init__(self, first: TextSource, second: TextSource, *, share_frac: float) -> None:
        if not 0 <= share_frac <= 1:
            raise ConfigError(f"share_frac = {share_frac} is not a share; choose 0 to 1")
        self._first, self._second, self._share_frac = first, second, share_frac

    def text(self, index: int) -> str:
        """Return the text at this position of the mixture."""
        before, is_second = _turn(index, self._share_frac)
        return self._second.text(before) if is_second else self._first.text(index - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCursor:
    """Where a stream stands: everything before it was read, nothing after it."""

    num_documents: int = 0
    """Documents read so far."""
    text_index: int = 0
    """Next text of the packed source."""
    token_offset: int = 0
    """Ids of that text that were used already [tokens]."""


class DocumentStream:
    """Packed documents of one length, and among them whole long texts that must not be cut apart."""

    def __init__(
        self,
        texts: TextSource,
        encode: Callable[[str], Sequence[int]],
        *,
        length: int,
        separator_id: int,
        long_texts: TextSource | None = None,
        long_share_frac: float = 0.0,
    ) -> None:
        """Keep the sources.

        Args:
            texts: what is packed, one after the other.
            encode: text to ids.
            length: ids of a packed document, and most ids of a whole one [tokens].
            separator_id: follows every text.
            long_texts: one whole document each; one that is too long loses its beginning.
            long_share_frac: share of documents that are whole long texts.

        Raises:
            ConfigError: the length is too short, or a share is asked for without a source.
        """
        if length < 2:
            raise ConfigError(f"length = {length}: a document needs at least 2 tokens")
        if not 0 <= long_share_frac <= 1 or (long_share_frac > 0 and long_texts is None):
            raise ConfigError(
                f"long_share_frac = {long_share_frac} needs long_texts and a value of 0 to 1"
            )
        self._texts, self._encode = texts, encode
        self._length, self._separator_id = length, separator_id
        self._long_texts, self._long_share_frac = long_texts, long_share_frac

    def read(self, cursor: StreamCursor) -> Iterator[tuple[Document, StreamCursor]]:
        """Yield each document from ``cursor`` on with the cursor that follows it; never ends."""
        text_index, offset = cursor.text_index, cursor.token_offset
        ids: list[int] = []  # of text number text_index
        for number in count(cursor.num_documents):
            before, is_long = _turn(number, self._long_share_frac)
            if is_long and self._long_texts is not None:
                taken = self._ids(self._long_texts.text(before))[-self._length :]
            else:
                taken = []
            while not is_long and len(taken) < self._length:
                ids = ids or self._ids(self._texts.text(text_index))
                piece = ids[offset : offset + self._length - len(taken)]
                taken += piece
                offset += len(piece)
                if offset >= len(ids):
                    text_index, offset, ids = text_index + 1, 0, []
            yield (
                Document(token_ids=tuple(taken), train_mask=(True,) * len(taken)),
                StreamCursor(num_documents=number + 1, text_index=text_index, token_offset=offset),
            )

    def _ids(self, text: str) -> list[int]:
        return [*self._encode(text), self._separator_id]


def _turn(index: int, share_frac: float) -> tuple[int, bool]:
    """Say whether the second of two sources has its turn at ``index``, and how many turns it had before."""
    before, after = int(index * share_frac), int((index + 1) * share_frac)
    return before, after > before
