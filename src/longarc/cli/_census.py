"""What ``longarc models info`` prints: tables whose last lines are the sums of the lines above."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longarc.models.census import Census
    from longarc.models.families import Anatomy

_BITS = {"fp32": 32, "bf16": 16, "fp8, int8": 8, "int4": 4}
"""Bits of one number in each dtype; the scales of quantised blocks are not counted."""


def describe(census: "Census", *, context_length: int) -> Iterator[str]:
    """Yield the lines: parameters by part, memory by dtype, cache and FLOPs of a token."""
    yield f"family: {census.anatomy.family}"
    yield ""
    yield from _parameters(census)
    yield ""
    yield from _weights(census)
    yield ""
    yield from _cache(census.anatomy, context_length)
    yield ""
    yield from _flops(census, context_length)


def _parameters(census: "Census") -> Iterator[str]:
    anatomy = census.anatomy
    rows = [
        [
            part.name,
            f"{part.size:,}",
            f"{part.copies:,}",
            f"{part.mtp_copies:,}",
            f"{part.size * (part.copies + part.mtp_copies):,}",
            f"{part.size * part.copies_per_token:,}",
        ]
        for part in anatomy.parts
    ]
    main, mtp, total = census.num_main_parameters, census.num_mtp_parameters, census.num_parameters
    rows.append([])
    if anatomy.num_mtp_layers:
        active = f"{census.num_active_parameters:,}"
        rows.append([f"without MTP, {short(main)}", "", "", "", f"{main:,}", active])
        rows.append([f"MTP, {short(mtp)}", "", "", "", f"{mtp:,}", ""])
        rows.append([f"all, {short(total)}", "", "", "", f"{total:,}", ""])
    else:
        active = f"{census.num_active_parameters:,}"
        rows.append([f"all, {short(total)}", "", "", "", f"{total:,}", active])
    header = ["part", "one copy", "copies", "in MTP", "parameters", "active per token"]
    yield from _table(header, rows)
    if anatomy.num_router_biases:
        yield f"not counted: {anatomy.num_router_biases:,} router biases, which are buffers"


def _weights(census: "Census") -> Iterator[str]:
    has_mtp = census.anatomy.num_mtp_layers > 0
    counts = [census.num_parameters, *([census.num_main_parameters] if has_mtp else [])]
    header = ["weights", "all", *(["without MTP"] if has_mtp else [])]
    yield from _table(
        header,
        [
            [dtype, *(_memory(count * bits // 8) for count in counts)]
            for dtype, bits in _BITS.items()
        ],
    )


def _cache(anatomy: "Anatomy", context_length: int) -> Iterator[str]:
    kinds = dict(anatomy.cache)
    main = sum(kinds.values())
    if anatomy.num_mtp_layers:
        kinds["all, without drafts"] = main
        kinds["MTP"] = anatomy.mtp_cache
        kinds["states to draft from"] = anatomy.draft_states
        kinds["all, with drafts"] = main + anatomy.mtp_cache + anatomy.draft_states
    else:
        kinds["all"] = main
    header = ["cache", "values a token", "fp32 a token", "bf16 a token"]
    header.append(f"bf16, {context_length:,} tokens")
    yield from _table(
        header,
        [
            [
                kind,
                f"{values:,}",
                _memory(4 * values),
                _memory(2 * values),
                _memory(2 * values * context_length),
            ]
            for kind, values in kinds.items()
        ],
    )


def _flops(census: "Census", context_length: int) -> Iterator[str]:
    active = census.num_active_parameters
    rows = [["weights", "", f"{2 * active:,}"]]
    for read in census.anatomy.reads:
        keys = read.num_keys(context_length)
        rows.append([read.name, f"{keys:,}", f"{read.flops_per_key * keys:,}"])
    total = census.num_flops_per_token(context_length)
    rows += [[], ["all", "", f"{total:,}"]]
    yield from _table(["forward of one token", "keys", "FLOP"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align the first column left and the others right; an empty row is a rule."""
    full = [row for row in (header, *rows) if row]
    widths = [max(len(row[column]) for row in full) for column in range(len(header))]
    for row in (header, *rows):
        if not row:
            yield "-" * (sum(widths) + 2 * (len(widths) - 1))
            continue
        first, *others = row
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()


def short(number: int) -> str:
    """Return a count in billions, millions or thousands: ``753.33 B``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _memory(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"
