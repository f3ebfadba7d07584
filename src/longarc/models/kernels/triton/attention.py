"""Sparse attention as Triton kernels, forward and backward; the host side is at the end.

::

    attend        query x block of heads    keys in turn, softmax on the way        -> output, log-sums
    mass          query x block of keys     heads in turn                           -> probabilities summed
    to_query      query x block of heads    keys in turn                            -> gradient of the query
    to_keys       query x block of keys     heads in turn                           -> gradient per listed row
    sum_rows      row of the table          what was listed of it, in order         -> gradient of the table

Nothing is added up with atomics, so that two runs give the same bits. What belongs to one query depends on that
query alone: it is the same in any company. Products are exact (``ieee``), never TF32; sums are fp32, in fp64 fp64.

A key has ``VALUE`` numbers that are its value and ``REST`` more. The kernels' names for sizes: n heads, s keys listed
per query (num_selected). Blocks: HEADS of heads, KEYS of keys; VALUE_BLOCK and REST_BLOCK are the widths, padded.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

KEY_GRADIENTS = 1 << 25
"""Upper bound on the gradients of listed rows that are held at once, before they are summed [numbers]."""
_MIN_BLOCK = 16
"""A product on a GPU needs this many rows and columns at least."""
_MAX_BLOCK = 32
"""Heads, and keys, of one product in half precision; wider numbers take more room, and get half of it."""


@triton.jit
@no_type_check
def _load_rows(start, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, is_there):
    """Load numbers ``first .. first + WIDTH`` of several rows that begin at ``start``."""
    column = tl.arange(0, BLOCK)
    mask = is_there[:, None] & (column < WIDTH)[None, :]
    return tl.load(start[:, None] + first + column[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def _store_rows(start, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, is_there, values):
    """Store ``values`` where `_load_rows` would load them."""
    column = tl.arange(0, BLOCK)
    mask = is_there[:, None] & (column < WIDTH)[None, :]
    tl.store(start[:, None] + first + column[None, :], values, mask=mask)


@triton.jit
@no_type_check
def _scores(q_value, q_rest, k_value, k_rest, is_key, SCALE: tl.constexpr, SUM: tl.constexpr):
    """Return scale q . k, [heads, keys]; -inf where there is no key."""
    score = tl.dot(q_value, tl.trans(k_value), input_precision="ieee", out_dtype=SUM)
    score += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee", out_dtype=SUM)
    return tl.where(is_key[None, :], score * SCALE, float("-inf"))


@triton.jit
@no_type_check
def _gradients(
    q_value,
    q_rest,
    grad,
    k_value,
    k_rest,
    is_key,
    log_sum,
    delta,
    SCALE: tl.constexpr,
    SUM: tl.constexpr,
):
    """Return probabilities and gradients of the unscaled scores, [heads, keys]."""
    score = _scores(q_value, q_rest, k_value, k_rest, is_key, SCALE, SUM)
    probability = tl.exp(score - log_sum[:, None])
    to_probability = tl.dot(grad, tl.trans(k_value), input_precision="ieee", out_dtype=SUM)
    return probability, probability * (to_probability - delta[:, None]) * SCALE


@triton.jit
@no_type_check
def _attend(
    query, table, rows, counts, output, log_sums,
    num_heads, num_selected,
    SCALE: tl.constexpr, SUM: tl.constexpr,
    VALUE: tl.constexpr, REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    q_start = query + (index * num_heads + head) * (VALUE + REST)
    q_value = _load_rows(q_start, 0, VALUE, VALUE_BLOCK, is_head)
    q_rest = _load_rows(q_start, VALUE, REST, REST_BLOCK, is_head)
    num_keys = tl.load(counts + index)
    most = tl.full([HEADS], float("-inf"), SUM)
    total = tl.zeros([HEADS], SUM)
    attended = tl.zeros([HEADS, VALUE_BLOCK], SUM)
    for first in range(0, num_keys, KEYS):
        slot = first + tl.arange(0, KEYS)
        is_key = slot < num_keys
        row = tl.load(rows + index * num_selected + slot, mask=is_key, other=0).to(tl.int64)
        k_start = table + row * (VALUE + REST)
        k_value = _load_rows(k_start, 0, VALUE, VALUE_BLOCK, is_key)
        k_rest = _load_rows(k_start, VALUE, REST, REST_BLOCK, is_key)
        score = _scores(q_value, q_rest, k_value, k_rest, is_key, SCALE, SUM)
        new_most = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - new_most[:, None])
        shrink = tl.exp(most - new_most)
        total = total * shrink + tl.sum(weight, 1)
        attended *= shrink[:, None]
        attended += tl.dot(weight.to(k_value.dtype), k_value, input_precision="ieee", out_dtype=SUM)
        most = new_most
    total = tl.where(
        num_keys > 0, total, float("nan")
    )  # nothing was selected, because scores are NaN
    o_start = output + (index * num_heads + head) * VALUE
    attended = (attended / total[:, None]).to(output.dtype.element_ty)
    _store_rows(o_start, 0, VALUE, VALUE_BLOCK, is_head, attended)
    tl.store(log_sums + index * num_heads + head, most + tl.log(total), mask=is_head)


@triton.jit
@no_type_check
def _mass(
    query, table, rows, counts, log_sums, mass,
    num_heads, num_selected,
    SCALE: tl.constexpr, SUM: tl.constexpr,
    VALUE: tl.constexpr, REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    is_key = slot < tl.load(counts + index)
    row = tl.load(rows + index * num_selected + slot, mask=is_key, other=0).to(tl.int64)
    k_start = table + row * (VALUE + REST)
    k_value = _load_rows(k_start, 0, VALUE, VALUE_BLOCK, is_key)
    k_rest = _load_rows(k_start, VALUE, REST, REST_BLOCK, is_key)
    total = tl.zeros([KEYS], SUM)
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        is_head = head < num_heads
        q_start = query + (index * num_heads + head) * (VALUE + REST)
        q_value = _load_rows(q_start, 0, VALUE, VALUE_BLOCK, is_head)
        q_rest = _load_rows(q_start, VALUE, REST, REST_BLOCK, is_head)
        log_sum = tl.load(log_sums + index * num_heads + head, mask=is_head, other=0.0)
        score = _scores(q_value, q_rest, k_value, k_rest, is_key, SCALE, SUM)
        probability = tl.exp(score - log_sum[:, None])
        total += tl.sum(tl.where(is_head[:, None], probability, 0.0), 0)
    total = total.to(mass.dtype.element_ty)
    tl.store(mass + index * num_selected + slot, total, mask=slot < num_selected)


@triton.jit
@no_type_check
def _to_query(
    query, table, rows, counts, grad, log_sums, deltas, grad_query,
    num_heads, num_selected,
    SCALE: tl.constexpr, SUM: tl.constexpr,
    VALUE: tl.constexpr, REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    q_start = query + (index * num_heads + head) * (VALUE + REST)
    q_value = _load_rows(q_start, 0, VALUE, VALUE_BLOCK, is_head)
    q_rest = _load_rows(q_start, VALUE, REST, REST_BLOCK, is_head)
    o_start = grad + (index * num_heads + head) * VALUE
    grad_value = _load_rows(o_start, 0, VALUE, VALUE_BLOCK, is_head)
    log_sum = tl.load(log_sums + index * num_heads + head, mask=is_head, other=0.0)
    delta = tl.load(deltas + index * num_heads + head, mask=is_head, other=0.0)
    num_keys = tl.load(counts + index)
    to_value = tl.zeros([HEADS, VALUE_BLOCK], SUM)
    to_rest = tl.zeros([HEADS, REST_BLOCK], SUM)
    for first in range(0, num_keys, KEYS):
        slot = first + tl.arange(0, KEYS)
        is_key = slot < num_keys
        row = tl.load(rows + index * num_selected + slot, mask=is_key, other=0).to(tl.int64)
        k_start = table + row * (VALUE + REST)
        k_value = _load_rows(k_start, 0, VALUE, VALUE_BLOCK, is_key)
        k_rest = _load_rows(k_start, VALUE, REST, REST_BLOCK, is_key)
        _, to_score = _gradients(
            q_value, q_rest, grad_value, k_value, k_rest, is_key, log_sum, delta, SCALE, SUM
        )
        to_score = to_score.to(k_value.dtype)
        to_value += tl.dot(to_score, k_value, input_precision="ieee", out_dtype=SUM)
        to_rest += tl.dot(to_score, k_rest, input_precision="ieee", out_dtype=SUM)
    start = grad_query + (index * num_heads + head) * (VALUE + REST)
    kind = grad_query.dtype.element_ty
    _store_rows(start, 0, VALUE, VALUE_BLOCK, is_head, to_value.to(kind))
    _store_rows(start, VALUE, REST, REST_BLOCK, is_head, to_rest.to(kind))


@triton.jit
@no_type_check
def _to_keys(
    query, table, rows, counts, grad, log_sums, deltas, grad_keys,
    first_query, num_heads, num_selected,
    SCALE: tl.constexpr, SUM: tl.constexpr,
    VALUE: tl.constexpr, REST: tl.constexpr, VALUE_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    in_block = tl.program_id(0).to(tl.int64)
    index = first_query + in_block
    slot = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    is_key = slot < tl.load(counts + index)
    row = tl.load(rows + index * num_selected + slot, mask=is_key, other=0).to(tl.int64)
    k_start = table + row * (VALUE + REST)
    k_value = _load_rows(k_start, 0, VALUE, VALUE_BLOCK, is_key)
    k_rest = _load_rows(k_start, VALUE, REST, REST_BLOCK, is_key)
    to_value = tl.zeros([KEYS, VALUE_BLOCK], SUM)
    to_rest = tl.zeros([KEYS, REST_BLOCK], SUM)
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        is_head = head < num_heads
        q_start = query + (index * num_heads + head) * (VALUE + REST)
        q_value = _load_rows(q_start, 0, VALUE, VALUE_BLOCK, is_head)
        q_rest = _load_rows(q_start, VALUE, REST, REST_BLOCK, is_head)
        o_start = grad + (index * num_heads + head) * VALUE
        grad_value = _load_rows(o_start, 0, VALUE, VALUE_BLOCK, is_head)
        log_sum = tl.load(log_sums + index * num_heads + head, mask=is_head, other=0.0)
        delta = tl.load(deltas + index * num_heads + head, mask=is_head, other=0.0)
        probability, to_score = _gradients(
            q_value, q_rest, grad_value, k_value, k_rest, is_key, log_sum, delta, SCALE, SUM
        )
        # A missing head has queries and gradients of zeros, so what it adds is zero.
        to_score_t = tl.trans(to_score.to(q_value.dtype))
        to_value += tl.dot(to_score_t, q_value, input_precision="ieee", out_dtype=SUM)
        to_value += tl.dot(
            tl.trans(probability.to(grad_value.dtype)),
            grad_value,
            input_precision="ieee",
            out_dtype=SUM,
        )
        to_rest += tl.dot(to_score_t, q_rest, input_precision="ieee", out_dtype=SUM)
    start = grad_keys + (in_block * num_selected + slot) * (VALUE + REST)
    is_slot = slot < num_selected
    _store_rows(start, 0, VALUE, VALUE_BLOCK, is_slot, to_value)
    _store_rows(start, VALUE, REST, REST_BLOCK, is_slot, to_rest)


@triton.jit
@no_type_check
def _sum_rows(grad_keys, order, starts, rows, grad_table, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    to = grad_table + tl.load(rows + index) * WIDTH + column
    total = tl.load(to, mask=is_column, other=0.0)
    for place in range(tl.load(starts + index), tl.load(starts + index + 1)):
        listed = tl.load(order + place)
        total += tl.load(grad_keys + listed * WIDTH + column, mask=is_column, other=0.0)
    tl.store(to, total, mask=is_column)


def triton_attention(
    query_Nnd: Float[Tensor, "N n d"],
    table_Rd: Float[Tensor, "R d"],
    rows_NS: Int[Tensor, "N S"],
    *,
    value_width: int,
    scale: float,
    with_mass: bool = False,
) -> tuple[Float[Tensor, "N n v"], Float[Tensor, "N S"] | None]:
    """Attend from each query to its own rows; see `sparse_attention`, whose back-end this is."""
    output: tuple[Tensor, Tensor] = _TritonAttention.apply(  # type: ignore[no-untyped-call]
        query_Nnd, table_Rd, rows_NS, value_width, scale, with_mass
    )
    return output[0], output[1] if with_mass else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a launch needs to know of the shapes."""

    num_queries: int
    num_heads: int
    num_selected: int
    value: int
    """Leading numbers of a key that are its value."""
    rest: int
    """The other numbers of a key."""
    scale: float
    dtype: torch.dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """What sums are computed in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def key_block(self) -> int:
        """Keys of one product."""
        return _MAX_BLOCK if self.dtype.itemsize <= 2 else _MIN_BLOCK

    @property
    def head_block(self) -> int:
        """Heads of one product."""
        whole: int = triton.next_power_of_2(self.num_heads)
        return min(max(whole, _MIN_BLOCK), self.key_block)

    def by_heads(self) -> tuple[int, int]:
        """Return the grid of a kernel that works on one query and a block of heads."""
        return self.num_queries, triton.cdiv(self.num_heads, self.head_block)

    def by_keys(self, num_queries: int) -> tuple[int, int]:
        """Return the grid of a kernel that works on one query and a block of keys."""
        return num_queries, triton.cdiv(self.num_selected, self.key_block)

    def constants(self) -> dict[str, Any]:
        """Return the arguments that a kernel is compiled for, and how."""
        return {
            "SCALE": self.scale,
            "SUM": tl.float64 if self.sum_dtype == torch.float64 else tl.float32,
            "VALUE": self.value,
            "REST": self.rest,
            "VALUE_BLOCK": max(triton.next_power_of_2(self.value), _MIN_BLOCK),
            "REST_BLOCK": max(triton.next_power_of_2(max(self.rest, 1)), _MIN_BLOCK),
            "HEADS": self.head_block,
            "KEYS": self.key_block,
            # Products and sums outside of dot are rounded as they are written (decision 0018).
            "enable_fp_fusion": False,
        }


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        table: Tensor,
        rows: Tensor,
        value_width: int,
        scale: float,
        with_mass: bool,
    ) -> tuple[Tensor, Tensor]:
        query, table, rows = query.contiguous(), table.contiguous(), rows.contiguous()
        num_queries, num_heads, width = query.shape
        sizes = Sizes(
            num_queries=num_queries,
            num_heads=num_heads,
            num_selected=rows.shape[1],
            value=value_width,
            rest=width - value_width,
            scale=scale,
            dtype=query.dtype,
        )
        n, s = sizes.num_heads, sizes.num_selected
        counts = (rows >= 0).sum(dim=1)
        output = query.new_empty(len(query), n, value_width)
        log_sums = query.new_empty(len(query), n, dtype=sizes.sum_dtype)
        mass = query.new_empty(rows.shape if with_mass else 0)
        _attend[sizes.by_heads()](
            query, table, rows, counts, output, log_sums, n, s, **sizes.constants()
        )
        if with_mass:
            _mass[sizes.by_keys(len(query))](
                query, table, rows, counts, log_sums, mass, n, s, **sizes.constants()
            )
        ctx.save_for_backward(query, table, rows, counts, output, log_sums)
        ctx.sizes = sizes
        ctx.mark_non_differentiable(mass)
        return output, mass

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, table, rows, counts, output, log_sums = ctx.saved_tensors
        sizes: Sizes = ctx.sizes
        grad = grad.contiguous()
        wide = sizes.sum_dtype
        deltas = (grad.to(wide) * output.to(wide)).sum(dim=-1)
        saved = (query, table, rows, counts, grad, log_sums, deltas)
        grad_query = torch.empty_like(query)
        _to_query[sizes.by_heads()](
            *saved, grad_query, sizes.num_heads, sizes.num_selected, **sizes.constants()
        )
        grad_table = torch.zeros_like(table, dtype=wide)
        size = max(1, KEY_GRADIENTS // (sizes.num_selected * table.shape[1]))
        for first in range(0, len(query), size):
            block = rows[first : first + size]
            grad_keys = query.new_empty(*block.shape, table.shape[1], dtype=wide)
            _to_keys[sizes.by_keys(len(block))](
                *(*saved, grad_keys, first, sizes.num_heads, sizes.num_selected),
                **sizes.constants(),
            )
            _add_by_row(grad_table, block.flatten(), grad_keys.flatten(0, 1))
        return grad_query, grad_table.to(table.dtype), None, None, None, None


def _add_by_row(grad_table: Tensor, rows: Tensor, grad_keys: Tensor) -> None:
    """Add each gradient to its row of the table, the first listed first."""
    order = rows.argsort(stable=True)[int((rows < 0).sum()) :]
    found, counts = rows[order].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    width = grad_table.shape[1]
    block = min(triton.next_power_of_2(width), 128)
    _sum_rows[(len(found), triton.cdiv(width, block))](
        grad_keys,
        order,
        starts,
        found,
        grad_table,
        WIDTH=width,
        BLOCK=block,
        enable_fp_fusion=False,
    )
