import hypothesis.strategies as st
import torch
from hypothesis import given

from longarc.algos import selection
from longarc.algos.selection import NO_KEY, select_keys

# Few distinct values, so that ties across the boundary are the rule; -inf is an invisible key.
score = st.sampled_from([float("-inf"), -1.0, -0.0, 0.0, 0.25, 0.5, 2.0])
tables = st.integers(1, 40).flatmap(
    lambda width: st.lists(st.lists(score, min_size=width, max_size=width), min_size=1, max_size=6)
)


@given(tables, st.integers(1, 12))
def test_selection_is_sorting_by_score_then_index(table, num_selected):
    selected = select_keys(torch.tensor(table), num_selected=num_selected)

    for row, got in zip(table, selected.tolist(), strict=True):
        visible = [i for i, value in enumerate(row) if value > float("-inf")]
        best = sorted(sorted(visible, key=lambda i: (-row[i], i))[:num_selected])
        assert got == best + [NO_KEY] * (num_selected - len(best))


@given(tables, st.integers(1, 12), st.data())
def test_a_row_with_a_nan_among_more_keys_than_it_may_read_gets_none(table, num_selected, data):
    broken = data.draw(st.integers(0, len(table) - 1))
    column = data.draw(st.integers(0, len(table[0]) - 1))
    healthy = select_keys(torch.tensor(table), num_selected=num_selected)
    table[broken][column] = float("nan")
    selected = select_keys(torch.tensor(table), num_selected=num_selected)

    visible = [i for i, value in enumerate(table[broken]) if value != float("-inf")]
    kept = visible if len(visible) <= num_selected else []
    assert selected[broken].tolist() == kept + [NO_KEY] * (num_selected - len(kept))
    others = [i for i in range(len(table)) if i != broken]
    assert torch.equal(selected[others], healthy[others])


@given(tables, st.integers(1, 12), st.integers(1, 9))
def test_a_row_is_selected_alike_in_any_company_and_with_any_invisible_tail(
    table, num_selected, tail
):
    together = select_keys(torch.tensor(table), num_selected=num_selected)
    for index, row in enumerate(table):
        alone = select_keys(torch.tensor([row + [float("-inf")] * tail]), num_selected=num_selected)
        assert torch.equal(alone[0], together[index])


@given(tables, st.integers(1, 12))
def test_other_devices_find_the_same_threshold_and_the_same_positions(table, num_selected):
    """What runs where numpy cannot, here on the CPU."""
    scores = torch.tensor(table)
    nth = min(num_selected, scores.shape[1])
    assert torch.equal(
        selection._nth_best_by_torch(scores, nth), selection._nth_best_by_numpy(scores, nth)
    )
    visible = scores > float("-inf")
    assert torch.equal(
        selection._flat_positions_by_torch(visible), selection._flat_positions_by_numpy(visible)
    )
