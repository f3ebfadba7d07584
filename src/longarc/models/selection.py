"""What a layer with an indexer hands to the layers behind it that have none (IndexShare).

It goes from layer to layer as an argument and a result. So a layer that is computed again for backward is
given the very tensors of the first time, and whoever runs part of the layers sees what has to cross.
Shape letters: N queries, S selected keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from longarc.models.key_selection import IndexerRows


@dataclass(frozen=True, slots=True)
class Selection:
    """One indexer's choice, and what its loss needs from all the layers that use it."""

    rows: Int[Tensor, "N S"] | None = None
    """Rows of the key table that each query attends to; None where attention is dense."""
    indexer_rows: IndexerRows | None = None
    """What the indexer computed, with its graph; None where no loss is asked for."""
    attention: tuple[Float[Tensor, "N S"], ...] = ()
    """Attention of each layer so far, summed over heads; kept for the loss alone."""

    def taken_apart(self) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], "Selection"]]:
        """Return the tensors, and how to put others into their places; that does not hold on to these."""
        has_rows, has_indexer = self.rows is not None, self.indexer_rows is not None
        tensors: list[Tensor] = [] if self.rows is None else [self.rows]
        if self.indexer_rows is not None:
            tensors += [self.indexer_rows.query, self.indexer_rows.key, self.indexer_rows.weight]

        def put_together(others: Sequence[Tensor]) -> Selection:
            left = list(others)
            rows = left.pop(0) if has_rows else None
            indexer_rows = None
            if has_indexer:
                query, key, weight, *left = left
                indexer_rows = IndexerRows(query, key, weight)
            return Selection(rows, indexer_rows, tuple(left))

        return [*tensors, *self.attention], put_together
