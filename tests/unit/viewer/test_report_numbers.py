import math

import pytest

from longarc.viewer.numbers import evenly, short, wilson_interval


@pytest.mark.parametrize(
    ("num_solved", "num_graded", "interval"),
    [
        # z^2 = 3.841459: (5 + 1.920729) / 13.841459 = 0.5, half = 1.959964 / 13.841459 * sqrt(2.5 + 0.960365)
        (5, 10, (0.236593, 0.763407)),
        # Of none solved the upper end is z^2 over n + z^2.
        (0, 10, (0.0, 0.277533)),
        (10, 10, (0.722467, 1.0)),
    ],
)
def test_intervals_are_wilsons(num_solved, num_graded, interval):
    assert wilson_interval(num_solved, num_graded) == pytest.approx(interval, abs=1e-6)


def test_nothing_graded_has_no_interval():
    assert wilson_interval(0, 0) is None


def test_numbers_become_short_and_never_nan():
    assert short(0.123456789) == 0.12346
    assert short(-1.23456789e-9, digits=3) == -1.23e-9
    assert [short(v) for v in (None, math.nan, math.inf, -math.inf)] == [None] * 4


def test_even_choices_keep_both_ends_and_never_repeat():
    for size in range(1, 40):
        for limit in range(size + 3):
            chosen = evenly(range(size), limit)
            assert len(chosen) == len(set(chosen)) == min(size, limit)
            if limit >= 2:
                assert (chosen[0], chosen[-1]) == (0, size - 1)
