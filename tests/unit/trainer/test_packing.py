"""Packing: what is shared, what is left out, what is refused."""

import pytest

from longarc.errors import ConfigError, ContractError
from longarc.models.layout import Span
from longarc.trainer.packing import Document, pack_shared, split_documents

PROMPT = tuple(range(100, 120))


def answer(*token_ids):
    return Document(
        token_ids=PROMPT + token_ids,
        train_mask=(False,) * len(PROMPT) + (True,) * len(token_ids),
    )


def test_a_shared_prompt_is_laid_out_once_and_its_last_row_predicts_every_first_token():
    (batch,) = pack_shared([answer(1, 2, 3), answer(4, 5)], micro_batch_tokens=100)
    assert batch.layout.spans == (Span(20), Span(2, 0), Span(1, 0))
    assert batch.token_ids.tolist() == [*PROMPT, 1, 2, 4]
    assert batch.source_rows.tolist() == [19, 20, 21, 19, 22]
    assert batch.target_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [20, 21, 22, 20, 21]
    assert batch.sequence_indices.tolist() == [0, 0, 0, 1, 1]


def test_a_prompt_that_needs_two_micro_batches_is_laid_out_in_both():
    batches = pack_shared([answer(*range(30)), answer(*range(50, 80))], micro_batch_tokens=60)
    assert [len(batch.token_ids) for batch in batches] == [49, 49]


def test_identical_sequences_share_every_row():
    (batch,) = pack_shared([answer(1, 2), answer(1, 2)], micro_batch_tokens=100)
    assert batch.layout.spans == (Span(21),)
    assert batch.source_rows.tolist() == [19, 20, 19, 20]


def test_a_sequence_that_is_the_beginning_of_another_adds_no_row():
    (batch,) = pack_shared([answer(1, 2, 3), answer(1)], micro_batch_tokens=100)
    assert sum(span.length for span in batch.layout.spans) == 22
    assert batch.source_rows.tolist()[-1] == 19


def test_short_common_beginnings_are_not_split_off():
    documents = [Document(token_ids=(7, 7, 7, i, i)) for i in range(3)]
    (batch,) = pack_shared(documents, micro_batch_tokens=100)
    assert batch.layout.spans == (Span(4), Span(4), Span(4))


def test_a_common_beginning_that_is_too_short_to_share_still_counts_against_the_budget():
    middle = tuple(range(10))  # shared by the first and the third, but too short for a span
    sequences = [answer(*middle, 50, 51), answer(60, 61), answer(*middle, 70, 71)]
    for budget in range(31, 60):
        for batch in pack_shared(sequences, micro_batch_tokens=budget):
            assert batch.layout.num_tokens <= budget


def test_documents_without_a_target_are_left_out():
    silent = Document(token_ids=(1, 2, 3), train_mask=(True, False, False))
    assert pack_shared([silent, Document(token_ids=(1,))], micro_batch_tokens=10) == []


def test_a_sequence_longer_than_a_micro_batch_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"11 tokens.*micro_batch_tokens=10"):
        pack_shared([Document(token_ids=range(12))], micro_batch_tokens=10)


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ContractError, match="3 tokens but a train_mask of 2"):
        Document(token_ids=(1, 2, 3), train_mask=(True, True))


def test_documents_are_split_evenly_and_those_that_begin_alike_stay_together():
    other = tuple(range(20))
    mixed = [answer(1), Document(token_ids=(*other, 3)), answer(2), Document(token_ids=(*other, 4))]
    mixed = [Document(token_ids=document.token_ids) for document in mixed]
    shards = split_documents(mixed, num_shards=2, micro_batch_tokens=100)
    assert sorted(map(len, shards)) == [2, 2]
    for shard in shards:
        assert len({tuple(document.token_ids[:20]) for document in shard}) == 1
    long, *short = [Document(token_ids=[i] * n) for i, n in enumerate((61, 21, 21, 21))]
    assert split_documents([*short, long], num_shards=2, micro_batch_tokens=100) == [[long], short]


def test_a_split_keeps_every_document_with_a_target_in_any_number_of_shards():
    silent = Document(token_ids=(1, 2), train_mask=(True, False))
    documents = [answer(i) for i in range(5)] + [answer(1), silent]
    for num_shards in range(1, 9):
        shards = split_documents(documents, num_shards=num_shards, micro_batch_tokens=100)
        assert len(shards) == num_shards
        kept = [document.token_ids for shard in shards for document in shard]
        assert sorted(kept) == sorted(d.token_ids for d in documents if d is not silent)
    assert split_documents([silent], num_shards=2, micro_batch_tokens=100) == [[], []]


def test_a_target_weighs_half_as_much_in_a_split_as_a_token_to_compute():
    context = Document(token_ids=[1] * 46, train_mask=[False] * 45 + [True])  # 2 x 45 + 1
    answers = [Document(token_ids=[i] * 11) for i in range(2, 7)]  # 2 x 10 + 10 each
    shards = split_documents([context, *answers], num_shards=2, micro_batch_tokens=100)
    assert shards == [[context, answers[4]], answers[:4]]


@pytest.mark.parametrize(("keys_per_row", "num_first"), [(1e9, 2), (1.0, 1)])
def test_attention_weighs_in_a_split_what_its_keys_cost(keys_per_row, num_first):
    lengths = (60, 20, 20, 20, 20)
    documents = [Document(token_ids=[i] * (n + 1)) for i, n in enumerate(lengths)]
    shards = split_documents(
        documents, num_shards=2, micro_batch_tokens=100, keys_per_row=keys_per_row
    )
    assert [len(shard) for shard in shards] == [num_first, len(lengths) - num_first]


def routed(token_ids, routing):
    mask = (False,) * len(PROMPT) + (True,) * (len(token_ids) - len(PROMPT))
    return Document(token_ids=token_ids, train_mask=mask, routing=routing)


def test_rows_are_shared_as_far_as_tokens_and_routing_are_the_same():
    first = [bytes([i]) for i in range(23)]
    same = routed((*PROMPT, 1, 2, 3), first)
    other = routed((*PROMPT, 4, 5), [*first[:20], b"x", b""])
    rerouted = routed((*PROMPT, 4, 5), [*first[:18], b"y", b"z", b"w", b""])
    (batch,) = pack_shared([same, other, rerouted], micro_batch_tokens=100)
    assert batch.layout.spans == (Span(18), Span(4, 0), Span(3, 0), Span(3, 0))
    assert batch.token_ids.tolist() == [*PROMPT, 1, 2, *PROMPT[18:], 4, *PROMPT[18:], 4]
    assert batch.routing == [*first[:22], *first[18:20], b"x", b"y", b"z", b"w"]
    assert batch.source_rows.tolist() == [19, 20, 21, 23, 24, 26, 27]


def test_the_routing_of_every_document_or_of_none_is_packed():
    with pytest.raises(ContractError, match="replay that of all, or of none"):
        pack_shared([answer(1), routed((*PROMPT, 1), [b""] * 21)], micro_batch_tokens=100)
    with pytest.raises(ContractError, match="21 tokens but the routing of 3"):
        routed((*PROMPT, 1), [b""] * 3)
