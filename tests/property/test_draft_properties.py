"""Which rows drafts read and attend to, whatever forest the documents are packed into."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longarc.models.draft_rows import draft_rows
from longarc.models.layout import Layout, Span

NUM_DEPTHS = 4


@st.composite
def forests(draw):
    """Length and parent of each span."""
    spans = []
    for index in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        spans.append((draw(st.integers(1, 6)), parent))
    return spans


def path_of(layout, row):
    """The rows of the sequence that ends in a row, from the layout alone."""
    offsets = layout.offsets()
    own = max(i for i, offset in enumerate(offsets) if offset <= row)
    rows = [
        r
        for span in layout.ancestors(own)
        for r in range(offsets[span], offsets[span] + layout.spans[span].length)
    ]
    return [*rows, *range(offsets[own], row + 1)]


@settings(max_examples=150, deadline=None)
@given(forests())
def test_a_draft_goes_back_along_its_own_sequence(spans):
    layout = Layout(tuple(Span(length, parent) for length, parent in spans))
    depths = draft_rows(layout, num_depths=NUM_DEPTHS, device=torch.device("cpu"))
    longest = int(layout.position_ids().max())
    assert len(depths) == min(NUM_DEPTHS, longest)
    table = depths[0].rows.tolist() if depths else []
    for depth, drafts in enumerate(depths, start=1):
        expected = [row for row in range(layout.num_tokens) if len(path_of(layout, row)) > depth]
        assert drafts.rows.tolist() == expected
        attended = {
            run.first_query + query: run.key_row_list()[: run.first_position + query + 1].tolist()
            for run in drafts.plan.runs
            for query in range(run.num_queries)
        }
        assert sorted(attended) == list(range(len(expected)))
        columns = (drafts.rows, drafts.before, drafts.first, drafts.positions)
        for index, (row, before, first, position) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            path = path_of(layout, row)
            assert before == path[-2]
            assert position == len(path) - 1 - depth
            # Depth 1 of position i lies in the row of token i + 1, and so do the keys before it.
            assert table[first] == path[position + 1]
            assert [table[key] for key in attended[index]] == path[1 : position + 2]
