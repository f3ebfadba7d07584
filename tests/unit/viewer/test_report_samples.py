import math

from longarc.viewer.samples import magnitude_histogram


def test_values_are_counted_by_half_decades_of_their_size():
    found = magnitude_histogram([0.0, 2e-7, -2e-7, 5e-7, 0.5])
    assert found["num_zero"] == 1
    # 1e-7 is bin 4 of half decades from 1e-9; half a decade ends at 3.16e-7.
    assert {i: n for i, n in enumerate(found["counts"]) if n} == {4: 2, 5: 1, 17: 1}
    assert found["max_abs"] == 0.5


def test_values_outside_the_range_count_at_its_ends_and_nothing_is_lost():
    values = [1e-30, 1e30, 3.0, math.nan, math.inf]
    found = magnitude_histogram(values)
    assert found["counts"][0] == 1
    assert sum(found["counts"]) + found["num_zero"] + found["num_not_finite"] == len(values)
    assert found["num_not_finite"] == 2
