"""Key selection and attention over packed sequences, with gradients and without [queries, keys] tensors.

The eager twins are ``Indexer.select``, ``sparse_attention``, ``dense_attention`` and ``windowed_attention`` in
``longarc.models``. Shape letters: N queries, n heads, g key heads, d key width, v value width,
j index heads, i index width, R rows, S selected keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.models.kernels.native import required


@dataclass(frozen=True, slots=True)
class FlatRuns:
    """All runs of a pass as two tensors."""

    run_rows: Int[Tensor, "runs 4"]
    """First query, queries, first position, start of its list in ``key_rows``."""
    key_rows: Int[Tensor, " rows"]
    """Rows by position, run after run."""

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, int, Tensor]]) -> "FlatRuns":
        """Join runs of (first query, queries, first position, rows by position)."""
        numbers, start = [], 0
        for first_query, num_queries, first_position, rows in runs:
            numbers.append((first_query, num_queries, first_position, start))
            start += len(rows)
        return cls(torch.tensor(numbers), torch.cat([rows for *_, rows in runs]))


def select(
    runs: FlatRuns,
    query_Nji: Float[Tensor, "N j i"],
    weight_Nj: Float[Tensor, "N j"],
    key_Ri: Float[Tensor, "R i"],
    *,
    num_selected: int,
) -> Int[Tensor, "N S"]:
    """Return the rows each query attends to, by ascending position, -1 last."""
    query_Nji, weight_Nj, key_Ri = (
        query_Nji.contiguous(),
        weight_Nj.contiguous(),
        key_Ri.contiguous(),
    )
    selected_NS = torch.empty(query_Nji.shape[0], num_selected, dtype=torch.long)
    required().call(
        "select",
        *(runs.run_rows, len(runs.run_rows), runs.key_rows),
        *(query_Nji.shape[1], query_Nji.shape[2], num_selected),
        *(query_Nji, weight_Nj, key_Ri, selected_NS, torch.get_num_threads()),
    )
    return selected_NS


def sparse_attention(
    runs: FlatRuns,
    query_Nnd: Float[Tensor, "N n d"],
    table_Rd: Float[Tensor, "R d"],
    rows_NS: Int[Tensor, "N S"],
    *,
    value_width: int,
    scale: float,
    with_mass: bool = False,
) -> tuple[Float[Tensor, "N n v"], Float[Tensor, "N S"] | None]:
    """Attend from each query to its own rows; values are the first ``value_width`` numbers of a row.

    Returns:
        The attended values, and where asked for the probabilities summed over heads (no gradient).
    """
    shape = _Shape(1, value_width, rows_NS.shape[1], scale)
    output: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        runs, query_Nnd, table_Rd[:, None], None, rows_NS, shape, with_mass
    )
    return output[0], output[1] if with_mass else None


def dense_attention(
    runs: FlatRuns,
    query_Nnd: Float[Tensor, "N n d"],
    key_Rgd: Float[Tensor, "R g d"],
    value_Rgv: Float[Tensor, "R g v"] | None,
    *,
    value_width: int,
    scale: float,
) -> Float[Tensor, "N n v"]:
    """Attend from each query to every position up to itself; values default to the head of the keys."""
    shape = _Shape(key_Rgd.shape[1], value_width, 0, scale)
    output: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        runs, query_Nnd, key_Rgd, value_Rgv, None, shape, False
    )
    return output[0]


def window_attention(
    runs: FlatRuns,
    query_Nnd: Float[Tensor, "N n d"],
    table_Rd: Float[Tensor, "R d"],
    *,
    window: int,
    value_width: int,
    scale: float,
) -> Float[Tensor, "N n v"]:
    """Attend from each query to the last ``window`` positions up to itself, without a list of them for each query.

    Values are the first ``value_width`` numbers of a row.
    """
    shape = _Shape(1, value_width, window, scale)
    output: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        runs, query_Nnd, table_Rd[:, None], None, None, shape, False
    )
    return output[0]


@dataclass(frozen=True, slots=True)
class _Shape:
    num_key_heads: int
    value_width: int
    num_selected: int
    """Keys of a query in its list, or without a list the last ones that it sees; 0 = all that it sees."""
    scale: float


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        runs: FlatRuns,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        rows: Tensor | None,
        shape: _Shape,
        with_mass: bool,
    ) -> tuple[Tensor, Tensor]:
        query, key = query.contiguous(), key.contiguous()
        value = value.contiguous() if value is not None else None
        num_queries, heads, _ = query.shape
        output = query.new_empty(num_queries, heads, shape.value_width)
        stats = query.new_empty(num_queries, heads, 2)
        mass = query.new_zeros(num_queries, shape.num_selected) if with_mass else query.new_empty(0)
        required().call(
            "attention",
            *_sizes(runs, query, shape),
            *(query, key, value, rows, output, stats, mass if with_mass else None),
            torch.get_num_threads(),
        )
        ctx.save_for_backward(query, key, value, rows, stats)
        ctx.runs, ctx.shape = runs, shape
        ctx.mark_non_differentiable(mass)
        return output, mass

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        query, key, value, rows, stats = ctx.saved_tensors
        grad_query, grad_key = torch.empty_like(query), _padded_zeros(key)
        grad_value = _padded_zeros(value) if value is not None else None
        required().call(
            "attention_backward",
            *_sizes(ctx.runs, query, ctx.shape),
            *(query, key, value, rows, grad.contiguous(), stats, grad_query, grad_key, grad_value),
            torch.get_num_threads(),
        )
        if value is not None and grad_value is not None:
            grad_value = grad_value[..., : value.shape[2]]
        return None, grad_query, grad_key[..., : key.shape[2]], grad_value, None, None, None


def _padded_zeros(table: Tensor) -> Tensor:
    """Return zeros like the table, with rows padded to whole vectors."""
    lanes = required().lanes
    rows, heads, width = table.shape
    return table.new_zeros(rows, heads, -(-width // lanes) * lanes)


def _sizes(runs: FlatRuns, query: Tensor, shape: _Shape) -> tuple[Any, ...]:
    _, heads, width = query.shape
    return (
        *(runs.run_rows, len(runs.run_rows), runs.key_rows),
        *(heads, shape.num_key_heads, width, shape.value_width, shape.num_selected, shape.scale),
    )
