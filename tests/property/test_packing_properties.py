"""Packing loses nothing, mixes nothing up and keeps its budget, whatever the sequences."""

from hypothesis import given, settings
from hypothesis import strategies as st

from longarc.trainer.packing import Document, pack_shared

BUDGET = 200


@st.composite
def families(draw):
    """Sequences that share beginnings of all lengths, including equal ones and prefixes of others."""
    trunk = draw(st.lists(st.integers(0, 3), min_size=1, max_size=90))
    documents = []
    for _ in range(draw(st.integers(1, 8))):
        kept = draw(st.integers(0, len(trunk)))
        tail = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
        token_ids = tuple(trunk[:kept] + tail)
        mask = draw(
            st.none()
            | st.lists(st.booleans(), min_size=len(token_ids), max_size=len(token_ids)).map(tuple)
        )
        documents.append(Document(token_ids=token_ids, train_mask=mask))
        if draw(st.booleans()):
            trunk = list(token_ids)
    return documents


def prefix_of_row(micro_batch, row):
    """What the row sees, from the layout alone: its ancestors whole and its own span up to itself."""
    layout, offsets = micro_batch.layout, micro_batch.layout.offsets()
    own = max(i for i, offset in enumerate(offsets) if offset <= row)
    rows = [
        r
        for span in layout.ancestors(own)
        for r in range(offsets[span], offsets[span] + layout.spans[span].length)
    ]
    rows += range(offsets[own], row + 1)
    return tuple(micro_batch.token_ids[rows].tolist())


def assert_packing_is_lossless(documents, micro_batches):
    seen = []
    for batch in micro_batches:
        assert len(batch.token_ids) == batch.layout.num_tokens <= BUDGET
        columns = (batch.source_rows, batch.target_ids, batch.sequence_indices, batch.positions)
        for row, target, sequence, position in zip(*(c.tolist() for c in columns), strict=True):
            document = documents[sequence]
            assert prefix_of_row(batch, row) == tuple(document.token_ids[:position])
            assert target == document.token_ids[position]
            seen.append((sequence, position))
    expected = [
        (index, position)
        for index, document in enumerate(documents)
        for position in range(1, len(document.token_ids))
        if document.train_mask is None or document.train_mask[position]
    ]
    assert sorted(seen) == expected


@given(families())
@settings(deadline=None, max_examples=150)
def test_each_trained_token_is_predicted_once_from_exactly_its_own_prefix(documents):
    assert_packing_is_lossless(documents, pack_shared(documents, micro_batch_tokens=BUDGET))


@given(families())
@settings(deadline=None, max_examples=50)
def test_sharing_never_computes_more_tokens_than_packing_side_by_side(documents):
    shared = pack_shared(documents, micro_batch_tokens=10_000)
    separate = [b for d in documents for b in pack_shared([d], micro_batch_tokens=10_000)]
    assert sum(b.layout.num_tokens for b in shared) <= sum(b.layout.num_tokens for b in separate)
