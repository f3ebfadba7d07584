import pytest

from longarc.viewer.matrix import evaluation_headline, matrix
from report_cases import make_cell

ORDER = ["a", "b", "c", "d"]


def column(*solved, num_graded=100):
    """Follow one family over stages; None leaves a stage out."""
    cells = [
        make_cell(stage, "files", n, num_graded=num_graded)
        for stage, n in zip(ORDER, solved, strict=False)
        if n is not None
    ]
    return [row[0] for row in matrix("eval", cells, ORDER)["rows"]]


def test_gains_forgetting_and_recovery_are_marked_against_the_best_so_far():
    marks = [entry["mark"] for entry in column(40, 80, 60, 78)]
    assert marks == ["first", "gained", "dropped", "recovered"]


def test_a_fall_within_five_percent_of_the_best_is_kept():
    assert [e["mark"] for e in column(100, 95, 94)] == ["first", "kept", "dropped"]


def test_a_slow_fall_is_measured_from_the_best_and_not_from_the_stage_before():
    fall = column(100, 96, 92)
    assert fall[2]["mark"] == "dropped"
    assert fall[2]["change_points"] == -8.0


def test_changes_within_the_noise_are_not_called_clear():
    assert [e["is_clear"] for e in column(40, 80, 60)] == [False, True, True]
    assert column(4, 6, num_graded=10)[1]["is_clear"] is False


def test_the_best_stage_is_marked_once_and_never_for_nothing():
    assert [e["is_best"] for e in column(40, 80, 80)] == [False, True, False]
    assert [e["is_best"] for e in column(0, 0)] == [False, False]


def test_rows_follow_the_recipe_and_not_the_order_of_evaluation():
    cells = [make_cell("b", "files", 2), make_cell("a", "files", 1), make_cell("other", "files", 3)]
    assert matrix("eval", cells, ORDER)["stages"] == ["a", "b", "other"]


def test_cells_that_are_missing_or_wholly_excluded_have_no_rate():
    cells = [make_cell("a", "files", 0, num_graded=0, num_excluded=5), make_cell("b", "format", 1)]
    found = matrix("eval", cells, ORDER)
    assert found["rows"][0][0]["rate"] is None
    assert found["rows"][0][1] is None
    assert found["num_excluded"] == 6
    assert found["kept"] == [None, 1.0]


def test_excluded_rollouts_change_no_rate():
    with_lost = make_cell("a", "files", 20, num_excluded=30)
    without = make_cell("a", "files", 20, num_excluded=0)
    rates = [matrix("eval", [cell], ORDER)["rows"][0][0]["rate"] for cell in (with_lost, without)]
    assert rates == [20 / 64, 20 / 64]


def test_what_is_left_at_the_end_is_a_share_of_the_best_of_all_stages():
    cells = [make_cell(stage, "files", n) for stage, n in zip(ORDER, (10, 40, 20), strict=False)]
    assert matrix("eval", cells, ORDER)["kept"] == [pytest.approx(0.5)]


def test_difficulties_are_ordered_as_numbers():
    (found,) = matrix("eval", [make_cell("a", "files", 20)], ORDER)["difficulty"]
    assert found["levels"] == ["3", "10"]
    assert found["rows"] == [[[20, 60], [0, 4]]]


def test_an_evaluation_is_summed_up_by_its_first_and_last_stage():
    cells = [
        make_cell("c", "files", 80, num_graded=100),
        make_cell("a", "files", 20, num_graded=100),
        make_cell("a", "format", 40, num_graded=100),
        make_cell("d", "files", 0, num_graded=0),
    ]
    found = evaluation_headline(cells, ORDER)
    assert (found["first"], found["last"]) == (0.3, 0.8)
    assert evaluation_headline([], ORDER) is None
