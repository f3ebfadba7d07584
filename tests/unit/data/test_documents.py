from itertools import islice

import pytest

from longarc.data.documents import (
    Document,
    DocumentStream,
    MixedTexts,
    ShuffledTexts,
    StreamCursor,
)
from longarc.errors import ConfigError, ContractError

SEPARATOR = 999


def encode(text):
    return [ord(c) for c in text]


class Named:
    """Text n is its name repeated, so that ids tell where they are from."""

    def __init__(self, names, lengths=(3,)):
        self.names, self.lengths = names, lengths

    def text(self, index):
        return self.names[index % len(self.names)] * self.lengths[index % len(self.lengths)]


def stream(**kwargs):
    settings = {"length": 7, "separator_id": SEPARATOR, **kwargs}
    return DocumentStream(Named("abcde", (3, 11, 1, 0)), encode, **settings)


def test_packing_loses_and_repeats_nothing():
    flat = [
        token
        for document, _ in islice(stream().read(StreamCursor()), 20)
        for token in document.token_ids
    ]
    expected = []
    for index in range(100):
        expected += [*encode(Named("abcde", (3, 11, 1, 0)).text(index)), SEPARATOR]
    assert flat == expected[:140]


@pytest.mark.parametrize("long_share_frac", [0.0, 0.3, 1.0])
def test_reading_goes_on_from_every_cursor_exactly(long_share_frac):
    def fresh():
        long = Named("XY", (4, 30))
        return stream(long_texts=long, long_share_frac=long_share_frac)

    whole = list(islice(fresh().read(StreamCursor()), 25))
    for done in range(24):
        cursor = whole[done][1]
        assert list(islice(fresh().read(cursor), 25 - done - 1)) == whole[done + 1 :]


def test_long_texts_come_whole_with_their_share_and_lose_only_their_beginning():
    mixed = stream(long_texts=Named("XY", (4, 30)), long_share_frac=0.25)
    documents = [d.token_ids for d, _ in islice(mixed.read(StreamCursor()), 40)]
    long = [ids for ids in documents if ids[0] in (ord("X"), ord("Y"))]
    assert len(long) == 10
    assert long[0] == (*encode("XXXX"), SEPARATOR)
    assert long[1] == (*encode("YYYYYY"), SEPARATOR)


def test_a_mixture_spreads_the_second_source_evenly_and_skips_no_text():
    mixed = MixedTexts(Named(["a0", "a1", "a2"], (1,)), Named(["b0", "b1"], (1,)), share_frac=0.4)
    assert [mixed.text(i) for i in range(5)] == ["a0", "a1", "b0", "a2", "b1"]
    many = [mixed.text(i)[0] for i in range(1000)]
    assert many.count("b") == 400


def test_every_epoch_holds_every_text_once_in_an_order_of_its_own():
    texts = [str(i) for i in range(50)]
    source = ShuffledTexts(texts, seed=1)
    first = [source.text(i) for i in range(50)]
    second = [source.text(i) for i in range(50, 100)]
    assert sorted(first) == sorted(second) == sorted(texts)
    assert first != second
    assert source.text(3) == first[3]  # going back gives the same
    assert [ShuffledTexts(texts, seed=2).text(i) for i in range(50)] != first


@pytest.mark.parametrize(
    "make",
    [
        lambda: ShuffledTexts([], seed=0),
        lambda: MixedTexts(Named("a"), Named("b"), share_frac=1.1),
        lambda: stream(length=1),
        lambda: stream(long_share_frac=0.5),
    ],
)
def test_what_cannot_be_read_is_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_a_document_whose_mask_has_another_length_is_refused():
    with pytest.raises(ContractError, match="2 ids but 1"):
        Document(token_ids=(1, 2), train_mask=(True,))
