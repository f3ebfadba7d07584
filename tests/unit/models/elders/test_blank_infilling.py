import random
from collections import Counter

import pytest
from elder_cases import IDS, texts
from hypothesis import given
from hypothesis import strategies as st

from longarc.errors import ContractError
from longarc.models.elders.blank_infilling import (
    GLM_130B_SHARES,
    BlankKind,
    blanks_example,
    draw_example,
    suffix_example,
)
from longarc.models.elders.spans import short_spans

a, b, c, d, e, f, g = range(100, 107)
M, G, S, E = IDS.mask, IDS.generation_mask, IDS.start, IDS.end


def in_order():
    """Return a generator that shuffles two blanks as the picture in the module has them: swapped."""
    return next(rng for rng in map(random.Random, range(20)) if shuffled(rng) == [1, 0])


def shuffled(rng):
    order, state = [0, 1], rng.getstate()
    rng.shuffle(order)
    rng.setstate(state)
    return order


def test_the_picture_of_the_module():
    example = blanks_example(
        [a, b, c, d, e, f, g], [(2, 3), (4, 6)], mask_id=M, ids=IDS, rng=in_order()
    )
    assert example.token_ids == (a, b, M, d, M, g, S, e, f, S, c)
    assert example.target_ids == (a, b, M, d, M, g, e, f, E, c, E)
    assert example.train_mask == (False,) * 6 + (True,) * 5
    assert example.positions == (0, 1, 2, 3, 4, 5, 4, 4, 4, 2, 2)
    assert example.block_positions == (0, 0, 0, 0, 0, 0, 1, 2, 3, 1, 2)
    assert example.num_context_tokens == 6


def test_a_suffix_is_generated_behind_its_mask_and_loses_no_token():
    example = suffix_example([a, b, c, d, e], 2, mask_id=G, ids=IDS)
    assert example.token_ids == (a, b, G, S, c, d)
    assert example.target_ids == (a, b, G, c, d, e)
    assert example.train_mask == (False, False, False, True, True, True)
    assert example.positions == (0, 1, 2, 2, 2, 2)
    assert example.block_positions == (0, 0, 0, 1, 2, 3)


@given(text=texts(min_size=2), seed=st.integers(0, 2**32))
def test_text_comes_back_when_the_blanks_are_filled_in(text, seed):
    rng = random.Random(seed)
    spans = short_spans(len(text), rng=rng)
    example = blanks_example(text, spans, mask_id=M, ids=IDS, rng=rng)

    context = list(example.token_ids[: example.num_context_tokens])
    contents: dict[int, list[int]] = {}
    trained = zip(
        example.token_ids, example.target_ids, example.positions, example.train_mask, strict=True
    )
    for token_id, target_id, place, is_trained in trained:
        if is_trained:
            content = contents.setdefault(place, [])
            assert token_id == (content[-1] if content else S)
            content.append(target_id)
    assert [context[place] for place in sorted(contents)] == [M] * len(spans)
    assert all(content[-1] == E for content in contents.values())
    filled = [contents[i][:-1] if i in contents else [x] for i, x in enumerate(context)]
    assert [token_id for piece in filled for token_id in piece] == text


@given(text=texts(min_size=3), seed=st.integers(0, 2**32), kind=st.sampled_from(BlankKind))
def test_fields_of_every_kind_fit_together(text, seed, kind):
    example = draw_example(
        text, ids=IDS, shares={kind: 1.0}, rng=random.Random(seed), sentence_starts=[0, 2]
    )
    num_context, length = example.num_context_tokens, len(example.token_ids)
    fields = [example.target_ids, example.train_mask, example.positions, example.block_positions]
    assert {len(field) for field in fields} == {length}
    assert example.train_mask == tuple(index >= num_context for index in range(length))
    assert example.positions[:num_context] == tuple(range(num_context))
    assert set(example.block_positions[:num_context]) <= {0}
    assert min(example.block_positions[num_context:]) == 1
    masks = [i for i, x in enumerate(example.token_ids[:num_context]) if x == IDS.mask_of(kind)]
    assert set(example.positions[num_context:]) == set(masks)
    trained = [x for x, t in zip(example.target_ids, example.train_mask, strict=True) if t]
    visible = [x for x in example.token_ids[:num_context] if x not in masks_of_all()]
    content = [x for x in trained if x != E]
    assert Counter(visible) + Counter(content) == Counter(text)


def masks_of_all():
    return {IDS.mask_of(kind) for kind in BlankKind}


def test_blanks_are_generated_in_every_order():
    text, spans = list(range(100, 110)), [(1, 2), (4, 5), (7, 8)]
    orders = {
        blanks_example(text, spans, mask_id=M, ids=IDS, rng=random.Random(seed)).target_ids[10:]
        for seed in range(60)
    }
    assert len(orders) == 6


def test_glm_130b_generates_long_text_seven_times_in_ten():
    rng, text = random.Random(0), list(range(100, 140))
    drawn = [draw_example(text, ids=IDS, shares=GLM_130B_SHARES, rng=rng) for _ in range(2000)]
    num_suffixes = sum(IDS.generation_mask in example.token_ids for example in drawn)
    assert num_suffixes / 2000 == pytest.approx(0.7, abs=0.04)


@pytest.mark.parametrize(
    "spans", [[], [(3, 3)], [(2, 1)], [(0, 2), (1, 4)], [(4, 6), (1, 2)], [(-1, 2)], [(4, 8)]]
)
def test_spans_that_are_no_blanks_are_refused(spans):
    with pytest.raises(ContractError, match="no blanks of a text of 7 tokens"):
        blanks_example(range(7), spans, mask_id=M, ids=IDS, rng=random.Random(0))


@pytest.mark.parametrize("start", [7, 8, -1])
def test_a_suffix_that_is_none_is_refused(start):
    with pytest.raises(ContractError, match="no blanks of a text of 7 tokens"):
        suffix_example(range(7), start, mask_id=G, ids=IDS)


@pytest.mark.parametrize(
    "shares",
    [{}, {BlankKind.SHORT: 0.0}, {BlankKind.SHORT: 2.0, BlankKind.SUFFIX: -1.0}],
)
def test_shares_that_choose_nothing_are_refused(shares):
    with pytest.raises(ContractError, match="shares"):
        draw_example(range(9), ids=IDS, shares=shares, rng=random.Random(0))
