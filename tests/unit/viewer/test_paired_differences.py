import pytest

from longarc.errors import ContractError
from longarc.viewer.matrix import matrix
from longarc.viewer.paired import paired_difference
from report_cases import make_cell


def results(both, lost, gained, neither):
    """Two lists of results with so many tasks of each kind."""
    before = [1] * both + [1] * lost + [0] * gained + [0] * neither
    after = [1] * both + [0] * lost + [1] * gained + [0] * neither
    return before, after


@pytest.mark.parametrize(
    ("counts", "interval"),
    [
        ((36, 2, 12, 0), (0.0569, 0.3404)),
        ((36, 12, 2, 0), (-0.3404, -0.0569)),
        ((0, 0, 0, 50), (-0.0713, 0.0713)),
        ((50, 0, 0, 0), (-0.0713, 0.0713)),
    ],
)
def test_intervals_are_newcombes(counts, interval):
    found = paired_difference(*results(*counts))
    assert (found.low, found.high) == pytest.approx(interval, abs=5e-5)
    assert (found.num_lost, found.num_gained) == counts[1:3]


def test_tasks_that_were_not_graded_both_times_are_left_out():
    found = paired_difference([1, None, 0, 0], [1, 1, None, 1])
    assert (found.num_pairs, found.num_gained, found.num_lost) == (2, 1, 0)
    assert paired_difference([None, 1], [1, None]) is None
    assert paired_difference([], []) is None


def test_a_few_tasks_that_all_change_alike_do_not_make_certainty():
    found = paired_difference([0, 0, 0], [1, 1, 1])
    assert found.difference == 1.0
    assert 0.0 < found.low < 0.6
    assert found.high == pytest.approx(1.0)


def test_results_of_other_tasks_are_refused():
    with pytest.raises(ContractError, match="1 and of 2 tasks"):
        paired_difference([1], [1, 0])


def test_pairing_calls_clear_what_two_intervals_leave_open():
    before, after = results(40, 2, 14, 44)
    cells = [
        make_cell("a", "files", 42, num_graded=100),
        make_cell("b", "files", 54, num_graded=100),
    ]
    apart = matrix("eval", cells, ["a", "b"])["rows"]
    cells[0]["solved"], cells[1]["solved"] = before, after
    paired = matrix("eval", cells, ["a", "b"])["rows"]
    assert [row[0]["is_clear"] for row in apart] == [False, False]
    assert [row[0]["is_clear"] for row in paired] == [False, True]
    assert "solved" not in paired[0][0]
