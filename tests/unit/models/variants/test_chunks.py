import torch

from longarc.models.layout import Layout, Span
from longarc.models.plan import AttentionPlan
from longarc.models.variants.chunks import ChunkForest

LAYOUT = Layout((Span(5), Span(3, 0), Span(4), Span(2, 0), Span(1, 1)))


def forest(*, are_continued=False):
    runs = AttentionPlan.of_layout(LAYOUT, torch.device("cpu")).runs
    return ChunkForest.of_runs(runs, num_tokens=15, chunk_tokens=2, are_continued=are_continued)


def test_spans_are_cut_into_chunks_by_depth():
    found = forest()
    assert found.tokens.tolist() == [
        *([0, 1], [8, 9]),
        *([2, 3], [10, 11]),
        [4, 15],
        *([5, 6], [12, 13]),
        [7, 15],
        [14, 15],
    ]
    assert found.levels == (
        slice(0, 2),
        slice(2, 4),
        slice(4, 5),
        slice(5, 7),
        slice(7, 8),
        slice(8, 9),
    )
    assert [level.tolist() for level in found.parents] == [[0, 1], [0], [0, 0], [0], [0]]
    assert found.root_runs == (0, 2)
    assert found.last_chunks == (4, 7, 3, 6, 8)


def test_continued_runs_all_begin_here():
    found = forest(are_continued=True)
    assert found.root_runs == (0, 1, 2, 3, 4)
    assert found.tokens[:5].tolist() == [[0, 1], [5, 6], [8, 9], [12, 13], [14, 15]]


def test_tokens_come_back_where_they_were():
    rows = torch.randn(15, 3)
    assert torch.equal(forest().scatter(forest().gather(rows)), rows)


def test_padding_is_zeros():
    chunked = forest().gather(torch.ones(15, 3))
    assert chunked[4].tolist() == [[1, 1, 1], [0, 0, 0]]
