import random

import pytest
import torch
import torch.nn.functional as F
from elder_cases import IDS, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from longarc.errors import ContractError
from longarc.models.elders.blank_infilling import (
    BlankKind,
    blanks_example,
    draw_example,
)
from longarc.models.elders.infilling_batch import InfillingBatch

SHARES = {BlankKind.SHORT: 0.5, BlankKind.SUFFIX: 0.5}


def packed(texts, seed):
    rng = random.Random(seed)
    return InfillingBatch.of(
        [draw_example(text, ids=IDS, shares=SHARES, rng=rng) for text in texts]
    )


def flex_mask(batch):
    length = len(batch.token_ids)
    return create_mask(batch.mask_mod(), None, None, length, length, device="cpu")[0, 0]


def test_who_sees_whom_in_one_example():
    example = blanks_example(
        range(100, 104), [(1, 2)], mask_id=IDS.mask, ids=IDS, rng=random.Random(0)
    )
    # Part A: 100 M 102 103; Part B: S 101.
    assert InfillingBatch.of([example]).dense_mask().int().tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]


@settings(deadline=None, max_examples=40)
@given(texts=st.lists(texts(min_size=3), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_mask_mod_and_dense_mask_say_the_same(texts, seed):
    batch = packed(texts, seed)
    assert torch.equal(flex_mask(batch), batch.dense_mask())


@given(texts=st.lists(texts(min_size=3), min_size=2, max_size=4), seed=st.integers(0, 2**32))
def test_part_a_never_sees_part_b_nor_anybody_another_example(texts, seed):
    batch = packed(texts, seed)
    mask, is_context, example_of = batch.dense_mask(), batch.is_context, batch.example_of
    assert not mask[is_context][:, ~is_context].any()
    assert not mask[example_of[:, None] != example_of[None]].any()
    # A token that is predicted is not seen where it is predicted: no later token of Part B is.
    later = torch.ones_like(mask).triu(1)
    assert not (mask & later)[:, ~is_context].any()
    assert mask.diagonal().all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_the_mask_is_dense_attention_with_the_table():
    batch = packed([list(range(100, 140)), list(range(100, 170)), list(range(100, 131))], seed=2)
    length = len(batch.token_ids)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 16, generator=generator) for _ in range(3))
    block_mask = create_block_mask(batch.mask_mod(), None, None, length, length, device="cpu")

    flex = flex_attention(query, key, value, block_mask=block_mask)
    dense = F.scaled_dot_product_attention(query, key, value, attn_mask=batch.dense_mask())
    torch.testing.assert_close(flex, dense, rtol=0, atol=1e-5)


def test_packing_keeps_every_field_in_order():
    rng = random.Random(1)
    examples = [draw_example(range(100, 100 + n), ids=IDS, shares=SHARES, rng=rng) for n in (9, 30)]
    batch = InfillingBatch.of(examples)
    for name in ("token_ids", "target_ids", "train_mask", "positions", "block_positions"):
        both = [value for example in examples for value in getattr(example, name)]
        assert getattr(batch, name).tolist() == both
    assert batch.example_of.bincount().tolist() == [len(x.token_ids) for x in examples]
    assert torch.equal(batch.is_context, ~batch.train_mask)


def test_nothing_cannot_be_packed():
    with pytest.raises(ContractError, match="at least one"):
        InfillingBatch.of([])
