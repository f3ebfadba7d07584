"""Which rows of a table each query of a pass sees, as the Triton kernels read it."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyLists:
    """The visible rows of every query, by position: a piece of one long list."""

    key_rows: Int[Tensor, " rows"]
    """All rows of the table in their order, then the lists of sequences whose rows do not lie in order."""
    first_keys: Int[Tensor, " queries"]
    """Where the piece of each query begins."""
    num_keys: Int[Tensor, " queries"]
    """Positions that each query sees, itself included."""
    max_keys: int
    """Positions that the last token of the longest sequence sees."""
