import pytest
import torch

from longarc.models.layout import Layout, Span
from longarc.models.plan import AttentionPlan
from longarc.models.variants.windows import window_rows, windowed_attention
from model_cases import LargestTensor

CPU = torch.device("cpu")


def rows_by_definition(layout, window):
    """For every token, the packed indices of the last ``window`` tokens of its sequence."""
    rows, offsets = [], layout.offsets()
    for index, span in enumerate(layout.spans):
        sequence = [
            offsets[a] + i
            for a in (*layout.ancestors(index), index)
            for i in range(layout.spans[a].length)
        ]
        first = len(sequence) - span.length
        rows += [sequence[max(0, p + 1 - window) : p + 1] for p in range(first, len(sequence))]
    return rows


LAYOUTS = [
    Layout.documents([7]),
    Layout.documents([3, 9, 1]),
    Layout((Span(6), Span(4, 0), Span(5), Span(3, 0), Span(7, 1))),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 4, 100])
def test_a_window_is_the_last_tokens_of_the_sequence(layout, window):
    rows = window_rows(AttentionPlan.of_layout(layout, CPU), window=window)
    expected = rows_by_definition(layout, window)
    assert [[r for r in row if r >= 0] for row in rows.tolist()] == expected
    assert all(row == sorted(row, key=lambda r: r < 0) for row in rows.tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 4, 100])
def test_attention_to_a_window_is_softmax_over_it(layout, window):
    draw = torch.Generator().manual_seed(1)
    tokens = layout.num_tokens
    query = torch.randn(tokens, 4, 6, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, tokens, 2, 6, generator=draw, dtype=torch.float64)
    attended = windowed_attention(
        query, key, value, AttentionPlan.of_layout(layout, CPU), window=window, scale=0.4
    )
    for token, rows in enumerate(rows_by_definition(layout, window)):
        for head in range(4):
            probability = (0.4 * key[rows, head // 2] @ query[token, head]).softmax(0)
            expected = probability @ value[rows, head // 2]
            torch.testing.assert_close(attended[token, head], expected, rtol=0, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    layout = Layout((Span(4), Span(2, 0), Span(3)))
    plan, tokens = AttentionPlan.of_layout(layout, CPU), layout.num_tokens
    query = torch.randn(tokens, 2, 3, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(tokens, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    assert torch.autograd.gradcheck(
        lambda *given: windowed_attention(*given, plan, window=3, scale=0.5), (query, key, value)
    )


def test_no_tensor_of_queries_times_keys_exists():
    layout = Layout.documents([2048])
    query, key = torch.randn(2048, 1, 4), torch.randn(2048, 1, 4)
    plan = AttentionPlan.of_layout(layout, CPU)
    with LargestTensor() as largest:
        windowed_attention(query, key, key, plan, window=16, scale=0.5)
    assert largest.numel == 2048 * 4
