import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longarc.errors import ContractError
from longarc.models.elders.spans import (
    MAX_SPAN_TOKENS,
    long_suffix,
    short_spans,
    whole_sentences,
)

seeds = st.integers(0, 2**32).map(random.Random)
fracs = st.floats(0.01, 0.99)


@given(num_tokens=st.integers(2, 300), rng=seeds, masked_frac=fracs, mean=st.floats(0.1, 60))
def test_short_spans_leave_a_visible_token_between_and_somewhere(
    num_tokens, rng, masked_frac, mean
):
    spans = short_spans(num_tokens, rng=rng, masked_frac=masked_frac, mean_length=mean)
    assert spans
    assert spans[0][0] >= 0
    assert spans[-1][1] <= num_tokens
    assert all(1 <= end - start <= MAX_SPAN_TOKENS for start, end in spans)
    assert all(right[0] > left[1] for left, right in pairwise(spans))
    assert sum(end - start for start, end in spans) < num_tokens


@given(num_tokens=st.integers(40, 400), rng=seeds)
def test_short_spans_reach_their_share_and_stop_there(num_tokens, rng):
    lengths = [end - start for start, end in short_spans(num_tokens, rng=rng)]
    target = int(0.15 * num_tokens)
    assert target <= sum(lengths) < target + MAX_SPAN_TOKENS


def test_lengths_follow_a_poisson_distribution_without_zero():
    rng = random.Random(0)
    lengths = [end - start for _ in range(300) for start, end in short_spans(1000, rng=rng)]
    # Mean of Poisson(3) given that it is not 0: 3 / (1 - e^-3) = 3.157; P(1 | not 0) = 0.1572.
    assert sum(lengths) / len(lengths) == pytest.approx(3.157, abs=0.05)
    assert lengths.count(1) / len(lengths) == pytest.approx(0.1572, abs=0.01)


def test_every_place_can_become_a_blank():
    rng = random.Random(0)
    hit = [0] * 12
    for _ in range(2000):
        for start, end in short_spans(12, rng=rng):
            for index in range(start, end):
                hit[index] += 1
    assert min(hit) > 50


@given(data=st.data(), rng=seeds, masked_frac=fracs)
def test_whole_sentences_are_blanked_and_one_stays(data, rng, masked_frac):
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=12))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    num_tokens = sum(lengths)
    sentences = {(start, start + n) for start, n in zip(starts, lengths, strict=True)}

    spans = whole_sentences(starts, num_tokens, rng=rng, masked_frac=masked_frac)
    assert spans == sorted(spans)
    assert set(spans) < sentences
    masked = sum(end - start for start, end in spans)
    assert masked >= masked_frac * num_tokens or len(spans) == len(sentences) - 1


@given(num_tokens=st.integers(3, 300), rng=seeds, min_frac=fracs)
def test_a_suffix_ends_with_the_text_and_leaves_two_tokens(num_tokens, rng, min_frac):
    start, end = long_suffix(num_tokens, rng=rng, min_frac=min_frac)
    assert end == num_tokens
    assert start >= 2 or num_tokens == 3
    assert end - start >= min(max(1, int(min_frac * num_tokens)), num_tokens - 2)


def test_one_seed_gives_one_choice():
    assert short_spans(100, rng=random.Random(4)) == short_spans(100, rng=random.Random(4))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda rng: short_spans(1, rng=rng), "1 tokens cannot have a blank"),
        (lambda rng: short_spans(9, rng=rng, masked_frac=1.0), "masked_frac = 1.0"),
        (lambda rng: short_spans(9, rng=rng, mean_length=0.0), "mean_length = 0.0"),
        (lambda rng: long_suffix(2, rng=rng), "2 tokens has no beginning"),
        (lambda rng: long_suffix(9, rng=rng, min_frac=0.0), "min_frac = 0.0"),
        (lambda rng: whole_sentences([0], 9, rng=rng), r"sentence starts \[0\]"),
        (lambda rng: whole_sentences([0, 4, 4], 9, rng=rng), "sentence starts"),
        (lambda rng: whole_sentences([1, 4], 9, rng=rng), "sentence starts"),
        (lambda rng: whole_sentences([0, 9], 9, rng=rng), "sentence starts"),
        (lambda rng: whole_sentences([], 9, rng=rng), "sentence starts"),
    ],
)
def test_wrong_numbers_are_refused(draw, message):
    with pytest.raises(ContractError, match=message):
        draw(random.Random(0))
