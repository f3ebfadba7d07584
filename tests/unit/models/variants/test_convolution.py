import torch
import torch.nn.functional as F

from longarc.models.layout import Layout, Span
from longarc.models.plan import AttentionPlan
from longarc.models.variants.convolution import cached_taps, causal_convolution, packed_taps
from longarc.models.variants.memory import CachedSequence


def by_torch(x, weight):
    """The convolution of one whole sequence."""
    padded = F.pad(x.T[None], (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], groups=len(weight))[0].T


def test_a_span_goes_on_where_its_parent_ends():
    layout = Layout((Span(2), Span(3, 0), Span(4), Span(1, 1), Span(5, 0)))
    x, weight = torch.randn(15, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    runs = AttentionPlan.of_layout(layout, torch.device("cpu")).runs
    found = causal_convolution(x, weight, packed_taps(runs, num_tokens=15, num_taps=4))
    for rows in ([0, 1, 2, 3, 4, 9], [5, 6, 7, 8], [0, 1, 10, 11, 12, 13, 14]):
        torch.testing.assert_close(found[rows], by_torch(x[rows], weight), rtol=0, atol=1e-12)


def test_a_cache_remembers_what_comes_before():
    x, weight = torch.randn(9, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    before, outputs = torch.zeros(1, 3, 3, dtype=torch.float64), []
    for piece in x.split([2, 1, 5, 1]):
        rows, next_rows = cached_taps(
            [CachedSequence(0, len(piece), 0)], num_tokens=len(piece), num_taps=4
        )
        outputs.append(causal_convolution(piece, weight, rows, before.flatten(0, 1)))
        before = torch.cat([piece, before.flatten(0, 1)])[next_rows]
    torch.testing.assert_close(torch.cat(outputs), by_torch(x, weight), rtol=0, atol=1e-12)
    assert torch.equal(before[0], x[-3:])


def test_gradients_are_those_of_finite_differences():
    runs = AttentionPlan.of_layout(Layout((Span(3), Span(2, 0))), torch.device("cpu")).runs
    rows = packed_taps(runs, num_tokens=5, num_taps=4)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: causal_convolution(*given, rows), (x, weight))
