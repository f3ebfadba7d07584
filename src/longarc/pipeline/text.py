"""Where the documents of pretrain, midtrain, dsa and mtp come from: real text, copy-rich text, long recall."""

from collections.abc import Iterator, Sequence

from longarc.config.stages import CorpusConfig
from longarc.data.corpora import passages, read_corpus
from longarc.data.documents import (
    DocumentStream,
    MixedTexts,
    ShuffledTexts,
    StreamCursor,
    TextSource,
)
from longarc.data.synthetic import CopyTexts, LongRecallTexts
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.packing import Document

PASSAGE_BYTES = 2000
"""Corpus texts are cut into passages of about this size before they are shuffled [bytes]."""


def corpus_texts(corpus: CorpusConfig, *, seed: int) -> TextSource:
    """Return the endless mixture of real and copy-rich text of one stage."""
    real = read_corpus(max_bytes=corpus.max_bytes)
    shuffled = ShuffledTexts(passages(real, passage_bytes=PASSAGE_BYTES), seed=seed)
    return MixedTexts(shuffled, CopyTexts(seed=seed), share_frac=corpus.copy_share_frac)


def document_stream(
    texts: TextSource,
    tokenizer: Tokenizer,
    *,
    context_tokens: int,
    long_share_frac: float = 0.0,
    seed: int,
) -> DocumentStream:
    """Return packed documents of ``context_tokens``, and among them whole recall texts of that length."""
    long_texts = LongRecallTexts(
        seed=seed,
        num_tokens=context_tokens,
        count_tokens=lambda text: len(tokenizer.encode(text)),
    )
    return DocumentStream(
        texts,
        tokenizer.encode,
        length=context_tokens,
        separator_id=tokenizer.special_id("<|endoftext|>"),
        long_texts=long_texts if long_share_frac > 0 else None,
        long_share_frac=long_share_frac,
    )


class StepDocuments:
    """The documents of each step of a stream, by step; another order than 0, 1, 2, ... costs a re-read."""

    def __init__(self, stream: DocumentStream, *, tokens_per_step: int) -> None:
        """Keep the stream; a step takes documents until it has ``tokens_per_step``."""
        self._stream = stream
        self._tokens_per_step = tokens_per_step
        self._next_step = 0
        self._reader = self._open()

    def __call__(self, step: int) -> Sequence[Document]:
        """Return the documents of 0-based ``step``."""
        if step < self._next_step:
            self._reader, self._next_step = self._open(), 0
        while self._next_step < step:
            self._take()
        return self._take()

    def _open(self) -> Iterator[Document]:
        return (
            Document(token_ids=document.token_ids)
            for document, _ in self._stream.read(StreamCursor())
        )

    def _take(self) -> list[Document]:
        taken: list[Document] = []
        num_tokens = 0
        while num_tokens < self._tokens_per_step:
            taken.append(next(self._reader))
            num_tokens += len(taken[-1].token_ids)
        self._next_step += 1
        return taken
