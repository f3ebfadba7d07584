"""Numbers as the report carries them: short, and never NaN, which JSON does not have."""

import math
from collections.abc import Iterable, Sequence

Z_95 = 1.959963984540054
"""Quantile of the normal distribution that bounds 95 % from both sides."""


def short(value: float | None, *, digits: int = 5) -> float | None:
    """Return a number with ``digits`` significant digits; None where there is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def short_list(values: Iterable[float], *, digits: int = 5) -> list[float | None]:
    """Return ``short`` of each."""
    return [short(value, digits=digits) for value in values]


def wilson_interval(num_solved: int, num_graded: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a success rate [fraction]; None where nothing was graded.

    centre +- half, with centre = (k + z^2 / 2) / (n + z^2). It stays inside 0 and 1, and says something
    also where nothing or everything was solved.

    Source: Wilson, 1927, Probable inference, the law of succession, and statistical inference.
    """
    if num_graded == 0:
        return None
    rate = num_solved / num_graded
    whole = num_graded + Z_95**2
    centre = (num_solved + Z_95**2 / 2) / whole
    half = Z_95 / whole * math.sqrt(num_graded * rate * (1 - rate) + Z_95**2 / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def evenly(items: Sequence[int], limit: int) -> list[int]:
    """Return at most ``limit`` of the items at even distances, first and last among them."""
    if len(items) <= limit:
        return list(items)
    if limit < 2:
        return list(items[:limit])
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]
