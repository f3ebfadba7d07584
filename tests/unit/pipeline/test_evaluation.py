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


def test_results_are_kept_task_by_task_and_compared_on_the_same_tasks():
    before = summarise([ended(reward, 2.0) for reward in [0.0] * 10 + [1.0] * 2 + [None]])
    after = summarise([ended(reward, 2.0) for reward in [1.0] * 11 + [0.0] + [1.0]])
    assert before["solved"] == [0] * 10 + [1] * 2 + [None]
    cells = [
        before | {"stage": "sft", "family": "files"},
        after | {"stage": "agentic_rl", "family": "files"},
    ]
    *_, head, line = matrix_lines(cells)
    assert head == "on the same tasks:"
    assert line == (
        "files: sft to agentic_rl +75.0 points, 95 % [+24.5, +92.3], 10 gained and 1 lost of 12 tasks"
    )


def test_results_of_before_tasks_were_kept_make_no_comparison():
    cells = [
        {"stage": stage, "family": "files", "num_solved": 1, "num_graded": 4}
        for stage in ("sft", "distill")
    ]
    assert len(matrix_lines(cells)) == 3
