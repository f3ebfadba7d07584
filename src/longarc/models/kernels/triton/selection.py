"""The indexer's scores and the choice of the best keys as Triton kernels; the host side is at the end.

::

    score     query x block of its positions    index heads in one product    -> scores of a block of queries
    choose    query                             k-th value, ties by position  -> rows

A score depends on query and key alone, never on the block or the company: the same token selects the same keys in
prefill, decode and training. The k-th value is found digit by digit, four bits at a time, in the integers that are
ordered as the scores are; nothing is sorted.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from longarc.models.kernels.key_lists import KeyLists

SCORES = 1 << 26
"""Upper bound on the scores that are held at once [numbers]."""
_MIN_BLOCK = 16
_KEY_BLOCK = 128


@triton.jit
@no_type_check
def _score(
    query, weight, table, key_rows, first_keys, counts, scores,
    first_query, room, num_heads,
    SUM: tl.constexpr, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    in_block = tl.program_id(0).to(tl.int64)
    index = first_query + in_block
    first = tl.program_id(1) * KEYS
    num_keys = tl.load(counts + index)
    if first < num_keys:
        position = first + tl.arange(0, KEYS)
        is_key = position < num_keys
        place = key_rows + tl.load(first_keys + index) + position
        row = tl.load(place, mask=is_key, other=0).to(tl.int64)
        column = tl.arange(0, WIDTH_BLOCK)
        is_column = (column < WIDTH)[None, :]
        key_mask = is_key[:, None] & is_column
        key = tl.load(table + row[:, None] * WIDTH + column[None, :], mask=key_mask, other=0.0)
        head = tl.arange(0, HEADS)
        is_head = head < num_heads
        start = (index * num_heads + head)[:, None] * WIDTH
        head_mask = is_head[:, None] & is_column
        q = tl.load(query + start + column[None, :], mask=head_mask, other=0.0)
        w = tl.load(weight + index * num_heads + head, mask=is_head, other=0.0)
        dot = tl.dot(q, tl.trans(key), input_precision="ieee", out_dtype=SUM)
        # Not `maximum`, which on a GPU drops NaN.
        total = tl.sum(tl.where(dot < 0.0, 0.0, dot) * w[:, None], 0)
        tl.store(scores + in_block * room + position, total, mask=is_key)


@triton.jit
@no_type_check
def _ordered(start, position, is_key, UINT: tl.constexpr, BITS: tl.constexpr):
    """Load scores as unsigned integers of the same order; -0 and 0 are equal."""
    score = tl.load(start + position, mask=is_key, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(UINT, bitcast=True)
    sign = tl.full([1], 1, UINT) << (BITS - 1)
    return tl.where((bits & sign) != 0, ~bits, bits | sign)


@triton.jit
@no_type_check
def _choose(
    scores, key_rows, first_keys, counts, selected,
    first_query, room, num_selected,
    UINT: tl.constexpr, BITS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    in_block = tl.program_id(0).to(tl.int64)
    index = first_query + in_block
    num_keys = tl.load(counts + index).to(tl.int32)
    start = scores + in_block * room
    rows = key_rows + tl.load(first_keys + index)
    to = selected + index * num_selected
    if num_keys <= num_selected:
        for first in range(0, num_selected, KEYS):
            position = first + tl.arange(0, KEYS)
            row = tl.load(rows + position, mask=position < num_keys, other=-1)
            tl.store(to + position, row, mask=position < num_selected)
    else:
        # The largest bound that at least num_selected scores reach, and how many are above it.
        bound = tl.full([1], 0, UINT)
        digit = tl.arange(0, 16).to(UINT)
        for known in range(4, BITS + 1, 4):
            shift = BITS - known
            bounds = bound | (digit << shift)
            reached = tl.zeros([16], tl.int32)
            for first in range(0, num_keys, KEYS):
                position = first + tl.arange(0, KEYS)
                is_key = position < num_keys
                score = _ordered(start, position, is_key, UINT, BITS)
                is_reached = (score[:, None] >= bounds[None, :]) & is_key[:, None]
                reached += tl.sum(is_reached.to(tl.int32), 0)
            chosen = tl.sum((reached >= num_selected).to(tl.int32), 0) - 1
            bound = bound | (chosen.to(UINT) << shift)
        num_above = 0
        num_broken = 0
        for first in range(0, num_keys, KEYS):
            position = first + tl.arange(0, KEYS)
            is_key = position < num_keys
            score = _ordered(start, position, is_key, UINT, BITS)
            num_above += tl.sum(((score > bound) & is_key).to(tl.int32), 0)
            number = tl.load(start + position, mask=is_key, other=0.0)
            num_broken += tl.sum((number != number).to(tl.int32), 0)
        num_ties = 0
        num_written = 0
        for first in range(0, num_keys, KEYS):
            position = first + tl.arange(0, KEYS)
            is_key = position < num_keys
            score = _ordered(start, position, is_key, UINT, BITS)
            is_tied = ((score == bound) & is_key).to(tl.int32)
            is_room = num_ties + tl.cumsum(is_tied, 0) <= num_selected - num_above
            is_taken = (((score > bound) & is_key) | ((is_tied > 0) & is_room)).to(tl.int32)
            slot = num_written + tl.cumsum(is_taken, 0) - 1
            row = tl.load(rows + position, mask=is_key, other=0)
            row = tl.where(num_broken > 0, -1, row)  # NaN has no order
            tl.store(to + slot, row, mask=is_taken > 0)
            num_ties += tl.sum(is_tied, 0)
            num_written += tl.sum(is_taken, 0)


def select(
    lists: KeyLists,
    query_Nji: Float[Tensor, "N j i"],
    weight_Nj: Float[Tensor, "N j"],
    key_Ri: Float[Tensor, "R i"],
    *,
    num_selected: int,
) -> Int[Tensor, "N S"]:
    """Return the rows each query attends to, by ascending position, -1 last."""
    query, weight, table = query_Nji.contiguous(), weight_Nj.contiguous(), key_Ri.contiguous()
    num_queries, num_heads, width = query.shape
    constants = selection_constants(num_heads=num_heads, width=width, dtype=query.dtype)
    of_choice = {name: constants[name] for name in ("UINT", "BITS", "KEYS", "enable_fp_fusion")}
    of_scores = {name: value for name, value in constants.items() if name not in ("UINT", "BITS")}
    wide = torch.promote_types(query.dtype, torch.float32)
    selected = torch.empty(num_queries, num_selected, dtype=torch.long, device=query.device)
    longest = lists.max_keys
    size = max(1, SCORES // longest)
    for first in range(0, num_queries, size):
        count = min(size, num_queries - first)
        scores = torch.empty(count, longest, dtype=wide, device=query.device)
        queries = (lists.key_rows, lists.first_keys, lists.num_keys)
        if longest > num_selected:
            _score[(count, triton.cdiv(longest, _KEY_BLOCK))](
                *(query, weight, table, *queries, scores, first, longest, num_heads), **of_scores
            )
        _choose[(count,)](*(scores, *queries, selected, first, longest, num_selected), **of_choice)
    return selected


def selection_constants(*, num_heads: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments that the kernels are compiled for, and how.

    Args:
        num_heads: index heads.
        width: of an index head.
        dtype: of queries and keys.
    """
    is_double = dtype == torch.float64
    return {
        "SUM": tl.float64 if is_double else tl.float32,
        "UINT": tl.uint64 if is_double else tl.uint32,
        "BITS": 64 if is_double else 32,
        "WIDTH": width,
        "WIDTH_BLOCK": max(triton.next_power_of_2(width), _MIN_BLOCK),
        "HEADS": max(triton.next_power_of_2(num_heads), _MIN_BLOCK),
        "KEYS": _KEY_BLOCK,
        "enable_fp_fusion": False,
    }
