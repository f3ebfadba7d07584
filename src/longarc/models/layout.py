"""How sequences share one packed token axis: a forest of spans, so that a shared prompt is computed once.

::

    tokens   [ prompt A ........ | answer 1 .... | answer 2 . | document B ............ ]
    spans      0 (root)            1 (parent 0)    2 (parent 0)  3 (root)

A span sees its ancestors whole and itself causally, and its positions go on where its parent ends,
so each leaf is computed exactly as if it stood alone behind its ancestors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from longarc.errors import ContractError


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of the packed axis that continue one other span, or start a sequence."""

    length: int
    """Tokens in the span; at least 1."""
    parent: int | None = None
    """Index of the span that this one continues, smaller than its own; None for a root."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Spans in the order in which their tokens lie on the packed axis."""

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if not self.spans:
            raise ContractError("a layout needs at least one span")
        for index, span in enumerate(self.spans):
            if span.length < 1:
                raise ContractError(
                    f"span {index} has length {span.length}; a span holds at least one token, leave it out"
                )
            if span.parent is not None and not 0 <= span.parent < index:
                raise ContractError(
                    f"span {index} names parent {span.parent}; a parent comes before its children, "
                    f"so it must lie in 0..{index - 1}"
                )

    @classmethod
    def documents(cls, lengths: Iterable[int]) -> "Layout":
        """Lay out independent documents one after another."""
        return cls(tuple(Span(length) for length in lengths))

    @property
    def num_tokens(self) -> int:
        """Tokens on the packed axis."""
        return sum(span.length for span in self.spans)

    def offsets(self) -> list[int]:
        """Return the packed index of the first token of each span."""
        offsets, total = [], 0
        for span in self.spans:
            offsets.append(total)
            total += span.length
        return offsets

    def start_positions(self) -> list[int]:
        """Return the position in its own sequence of the first token of each span."""
        starts: list[int] = []
        for span in self.spans:
            parent = span.parent
            starts.append(0 if parent is None else starts[parent] + self.spans[parent].length)
        return starts

    def ancestors(self, index: int) -> tuple[int, ...]:
        """Return the spans that span ``index`` continues, root first."""
        chain: list[int] = []
        parent = self.spans[index].parent
        while parent is not None:
            chain.append(parent)
            parent = self.spans[parent].parent
        return tuple(reversed(chain))

    def position_ids(self) -> Int[Tensor, " tokens"]:
        """Return the position of each token in its own sequence."""
        return torch.cat(
            [
                torch.arange(start, start + span.length)
                for start, span in zip(self.start_positions(), self.spans, strict=True)
            ]
        )
