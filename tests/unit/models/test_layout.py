import pytest

from longarc.errors import ContractError
from longarc.models.layout import Layout, Span


def test_positions_go_on_where_the_parent_ends():
    layout = Layout((Span(3), Span(2, parent=0), Span(1, parent=1), Span(2, parent=0), Span(2)))

    assert layout.num_tokens == 10
    assert layout.position_ids().tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1]
    assert layout.ancestors(2) == (0, 1)
    assert layout.ancestors(4) == ()


def test_documents_are_roots():
    assert Layout.documents([2, 3]) == Layout((Span(2), Span(3)))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((), "at least one span"),
        ((Span(0),), "length 0"),
        ((Span(1, parent=0),), "parent 0"),
        ((Span(1), Span(1, parent=5)), "parent 5"),
    ],
)
def test_an_impossible_layout_is_refused(spans, message):
    with pytest.raises(ContractError, match=message):
        Layout(spans)
