"""Worked thinking for families of ``reasoning-gym``: what an expert writes before its answer.

One function per family, from an entry of the dataset to compact lines of one regular form, so that a
very small model can learn each step as a local rule. Every function ends where the answer can be
copied from what it wrote.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

Entry: TypeAlias = Mapping[str, Any]
"""An entry as reasoning-gym makes it: ``question``, ``answer`` and ``metadata``."""


def chain_sum(entry: Entry) -> str:
    """Running results, one operation a line; numbers of several digits column by column.

    ``4 - 1 - 7`` gives ``4-1=3`` and ``3-7=-4``; ``37 + 85`` gives ``37+85:7+5=12,3+8+1=12;122``.
    """
    first, *rest = entry["metadata"]["expression"].split()
    has_columns = entry["metadata"]["num_digits"] > 1
    running, lines = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        amount = int(term) if operator == "+" else -int(term)
        result = running + amount
        if has_columns:
            lines.append(f"{running}{operator}{term}:{_columns(running, amount)};{result}")
        else:
            lines.append(f"{running}{operator}{term}={result}")
        running = result
    return "\n".join(lines)


def _columns(a: int, b: int) -> str:
    """The columns of a + b from the right: magnitudes are added where signs agree, else subtracted."""
    if (a < 0) == (b < 0):
        return _added(abs(a), abs(b))
    return _subtracted(max(abs(a), abs(b)), min(abs(a), abs(b)))


def _added(a: int, b: int) -> str:
    steps, carry = [], 0
    while a or b:
        total = a % 10 + b % 10 + carry
        steps.append(f"{a % 10}+{b % 10}{'+1' if carry else ''}={total}")
        a, b, carry = a // 10, b // 10, total // 10
    return ",".join(steps)


def _subtracted(large: int, small: int) -> str:
    """Columns of large - small; a column that needs it borrows ten first, the next one pays one."""
    steps, borrow = [], 0
    while large:
        top, low = large % 10, small % 10
        owed, borrow = borrow, int(top - low - borrow < 0)
        top += 10 * borrow
        steps.append(f"{top}-{low}{'-1' if owed else ''}={top - low - owed}")
        large, small = large // 10, small // 10
    return ",".join(steps)


def number_sorting(entry: Entry) -> str:
    """Selection: what is left, and the next one out of it.

    ``52.0 14.0 30.0`` ascending gives ``52.0 14.0 30.0>14.0``, ``52.0 30.0>30.0``, ``52.0>52.0``.
    """
    left, lines = list(entry["metadata"]["original_numbers"]), []
    for number in entry["metadata"]["sorted_numbers"]:
        lines.append(f"{' '.join(left)}>{number}")
        left.remove(number)
    return "\n".join(lines)


def number_filtering(entry: Entry) -> str:
    """Each number against the bound, and what becomes of it: ``14<37 keep``, ``52>37 drop``."""
    metadata = entry["metadata"]
    bound = float(metadata["filter_value"])
    keeps, side = metadata["operation"].split("_")
    lines = []
    for number in metadata["original_numbers"]:
        value = float(number)
        sign = "=" if value == bound else "<" if value < bound else ">"
        is_named = sign == {"smaller": "<", "larger": ">"}[side]
        verdict = "keep" if is_named == (keeps == "keep") else "drop"
        lines.append(f"{number}{sign}{metadata['filter_value']} {verdict}")
    return "\n".join(lines)


def word_sequence_reversal(entry: Entry) -> str:
    """The words numbered, so that they can be read off from the last number down."""
    return "\n".join(f"{n} {word}" for n, word in enumerate(entry["metadata"]["words"], start=1))


def spell_backward(entry: Entry) -> str:
    """The letters apart, then the same from the end."""
    word = entry["metadata"]["word"]
    return f"{' '.join(word)}\n{' '.join(reversed(word))}"


WORKED: Final[Mapping[str, Callable[[Entry], str]]] = {
    "chain_sum": chain_sum,
    "number_sorting": number_sorting,
    "number_filtering": number_filtering,
    "word_sequence_reversal": word_sequence_reversal,
    "spell_backward": spell_backward,
}
"""The families that have an expert."""
