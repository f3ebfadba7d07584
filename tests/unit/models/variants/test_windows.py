import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from longarc.algos.selection import NO_KEY
from longarc.models.kernels.attention import sparse_attention, window_attention
from longarc.models.kernels.native import native
from longarc.models.layout import Layout, Span
from longarc.models.plan import AttentionPlan
from longarc.models.variants.windows import windowed_attention
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


NATIVE = pytest.mark.skipif(native() is None, reason="the native kernels are not built")


@NATIVE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 4, 100])
def test_the_kernel_takes_the_last_rows_as_if_they_were_listed_bit_for_bit(layout, window):
    draw, tokens = torch.Generator().manual_seed(2), layout.num_tokens
    runs = AttentionPlan.of_layout(layout, CPU).flat_runs()
    listed = pad_sequence(
        [torch.tensor(rows) for rows in rows_by_definition(layout, window)],
        batch_first=True,
        padding_value=NO_KEY,
    )
    query, table = (
        torch.randn(tokens, 4, 12, generator=draw),
        torch.randn(tokens, 12, generator=draw),
    )
    weights, found = torch.randn(tokens, 4, 8, generator=draw), []
    for attend in (
        lambda q, t: sparse_attention(runs, q, t, listed, value_width=8, scale=0.4)[0],
        lambda q, t: window_attention(runs, q, t, window=window, value_width=8, scale=0.4),
    ):
        leaves = [x.clone().requires_grad_() for x in (query, table)]
        attended = attend(*leaves)
        (attended * weights).sum().backward()
        found.append([attended.detach(), *(leaf.grad for leaf in leaves)])
    for by_list, by_range in zip(*found, strict=True):
        assert torch.equal(by_list, by_range)


@NATIVE
def test_the_kernel_keeps_no_list_of_the_windows_for_backward():
    layout = Layout.documents([2048])
    runs = AttentionPlan.of_layout(layout, CPU).flat_runs()
    query = torch.randn(2048, 1, 16, requires_grad=True)
    table, kept = torch.randn(2048, 16), []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        window_attention(runs, query, table, window=256, value_width=8, scale=0.4)
    assert max(largest.numel, *kept) == 2048 * 16
