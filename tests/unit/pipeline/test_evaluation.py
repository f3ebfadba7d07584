from dataclasses import replace

from ledger_cases import make_admission, make_trajectory
from longarc.pipeline.evaluation import matrix_lines, summarise
from longarc.records.outcome import Outcome


def ended(reward, difficulty, outcome=Outcome.COMPLETED):
    return replace(
        make_trajectory(make_admission()), reward=reward, difficulty=difficulty, outcome=outcome
    )


def test_excluded_rollouts_are_counted_apart_and_never_as_failures():
    cell = summarise([ended(1.0, 2.0), ended(0.0, 3.0), ended(None, 3.0, Outcome.SANDBOX_LOST)])
    assert (cell["num_solved"], cell["num_graded"], cell["num_excluded"]) == (1, 2, 1)
    assert cell["by_difficulty"] == {"2": [1, 1], "3": [0, 1]}
    assert cell["outcomes"] == {"completed": 2, "sandbox_lost": 1}


def test_many_difficulties_become_a_few_ranges_that_hold_everything():
    cell = summarise([ended(float(i % 2), 2048.0 + 20 * i) for i in range(90)])
    assert len(cell["by_difficulty"]) <= 8
    assert sum(total for _, total in cell["by_difficulty"].values()) == 90
    assert sum(solved for solved, _ in cell["by_difficulty"].values()) == 45


def test_the_matrix_has_a_row_per_checkpoint_and_a_dash_where_nothing_was_graded():
    cells = [
        {"stage": "sft", "family": "files", "num_solved": 1, "num_graded": 4},
        {"stage": "distill", "family": "files", "num_solved": 3, "num_graded": 4},
        {"stage": "sft", "family": "recall", "num_solved": 0, "num_graded": 0},
    ]
    header, sft, distill = matrix_lines(cells)
    assert header.split() == ["files", "recall"]
    assert sft.split() == ["sft", "25.0%", "-"]
    assert distill.split() == ["distill", "75.0%", "-"]
