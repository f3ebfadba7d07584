"""A forest of spans as chunks of tokens, and which chunk continues which.

::

    spans     prompt (100 tokens)          answer 1 (70, continues the prompt)   document (30)
    chunks    0: 64   1: 36 + padding      2: 64   3: 6 + padding                4: 30 + padding
    depth     0       1                    2       3                             0

Chunks of one depth do not depend on each other, so a pass takes as many steps as the longest sequence
has chunks, however many sequences there are. Shape letters: N tokens, X chunks, C tokens of a chunk.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from longarc.models.plan import QueryRun


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk before it has its number."""

    first_token: int
    num_tokens: int
    parent: int | None
    """The piece that this one continues."""
    depth: int
    run: int


@dataclass(frozen=True, slots=True)
class ChunkForest:
    """All chunks of a pass, those of depth 0 first."""

    num_tokens: int
    tokens: Int[Tensor, "X C"]
    """Packed index of each token; ``num_tokens`` stands for padding."""
    levels: tuple[slice, ...]
    """The chunks of each depth."""
    parents: tuple[Int[Tensor, " _chunks"], ...]
    """Of each depth but the first: which chunk of the depth before each chunk continues."""
    root_runs: tuple[int, ...]
    """The run that each chunk of depth 0 begins."""
    last_chunks: tuple[int, ...]
    """The last chunk of each run."""

    @classmethod
    def of_runs(
        cls,
        runs: Sequence[QueryRun],
        *,
        num_tokens: int,
        chunk_tokens: int,
        are_continued: bool,
    ) -> "ChunkForest":
        """Cut runs into chunks.

        Args:
            runs: consecutive tokens each; where one continues another, that one comes before it.
            num_tokens: tokens on the packed axis.
            chunk_tokens: most tokens of a chunk.
            are_continued: whether what comes before each run is remembered elsewhere (in a cache), so that
                each begins a sequence here; else it continues the token before it, if it has one.
        """
        pieces: list[_Piece] = []
        piece_of_last_token: dict[int, int] = {}
        for index, run in enumerate(runs):
            parent = None
            if run.first_position and not are_continued:
                parent = piece_of_last_token[int(run.key_row_list()[run.first_position - 1])]
            for start in range(0, run.num_queries, chunk_tokens):
                depth = 0 if parent is None else pieces[parent].depth + 1
                count = min(chunk_tokens, run.num_queries - start)
                pieces.append(_Piece(run.first_query + start, count, parent, depth, index))
                parent = len(pieces) - 1
            piece_of_last_token[run.first_query + run.num_queries - 1] = len(pieces) - 1
        return cls._by_depth(pieces, num_tokens=num_tokens, chunk_tokens=chunk_tokens)

    @classmethod
    def _by_depth(
        cls, pieces: Sequence[_Piece], *, num_tokens: int, chunk_tokens: int
    ) -> "ChunkForest":
        order = sorted(range(len(pieces)), key=lambda piece: pieces[piece].depth)
        place = {piece: chunk for chunk, piece in enumerate(order)}
        tokens_XC = torch.full((len(pieces), chunk_tokens), num_tokens)
        sizes = Counter(piece.depth for piece in pieces)
        starts = list(accumulate((sizes[depth] for depth in range(len(sizes))), initial=0))
        parents: list[list[int]] = [[] for _ in sizes]
        last_chunks: dict[int, int] = {}
        for chunk, piece in enumerate(pieces[index] for index in order):
            tokens_XC[chunk, : piece.num_tokens] = (
                torch.arange(piece.num_tokens) + piece.first_token
            )
            if piece.parent is not None:
                parents[piece.depth].append(place[piece.parent] - starts[piece.depth - 1])
            last_chunks[piece.run] = chunk  # the last of a run is its deepest
        return cls(
            num_tokens,
            tokens_XC,
            tuple(starmap(slice, pairwise(starts))),
            tuple(torch.tensor(level) for level in parents[1:]),
            tuple(pieces[index].run for index in order[: starts[1]]),
            tuple(last_chunks[run] for run in sorted(last_chunks)),
        )

    def gather(self, rows: Shaped[Tensor, "N ..."]) -> Shaped[Tensor, "X C ..."]:
        """Lay out the tokens' rows by chunk; padding is zeros, and rows of no chunk are left out."""
        padded = torch.cat([rows[: self.num_tokens], rows.new_zeros((1, *rows.shape[1:]))])
        return padded[self.tokens.to(rows.device)]

    def scatter(self, chunked: Shaped[Tensor, "X C ..."]) -> Shaped[Tensor, "N ..."]:
        """Bring rows by chunk back to the order of the tokens; a token of no chunk gets zeros."""
        tokens = self.tokens.flatten().to(chunked.device)
        is_token = tokens < self.num_tokens
        scattered = chunked.new_zeros((self.num_tokens, *chunked.shape[2:]))
        return scattered.index_copy(0, tokens[is_token], chunked.flatten(0, 1)[is_token])
