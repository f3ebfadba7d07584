"""Ids and texts for the tests of blank infilling."""

from hypothesis import strategies as st

from longarc.models.elders.blank_infilling import InfillingIds

IDS = InfillingIds(mask=1, sentence_mask=2, generation_mask=3, start=4, end=5)


def texts(*, min_size: int) -> st.SearchStrategy[list[int]]:
    """Texts of ids that have no role."""
    return st.lists(st.integers(100, 120), min_size=min_size, max_size=60)
