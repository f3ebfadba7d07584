"""FP8 in blocks: values worked out by hand, and what holds for all matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longarc.algos.fp8 import fp8_rounded, fp8_rounded_rows
from longarc.errors import ContractError


def test_numbers_are_rounded_to_three_bits_of_mantissa_under_the_scale_of_their_block():
    # The scale is 1/448. 0.3 is 134.4 of it, between 128 and 144; 0.7 is 313.6, between 288 and 320.
    weight = torch.tensor([[1.0, 0.3], [0.0, -0.7]])
    expected = torch.tensor([[448, 128], [0, -320]]) / 448
    torch.testing.assert_close(fp8_rounded(weight, block_size=2), expected, rtol=1e-6, atol=0)


def test_a_block_has_a_scale_of_its_own_and_the_last_ones_may_be_smaller():
    weight = torch.tensor([[1.0, 1.0, 1000.0], [1.0, 1.0, 300.0], [1e-9, 0.0, 0.3]])
    rounded = fp8_rounded(weight, block_size=2)
    # 300 is 134.4 of 1000/448, and 0.3 is alone in its block.
    expected = torch.tensor([[1, 1, 1000], [1, 1, 128 * 1000 / 448], [1e-9, 0, 0.3]])
    torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=0)


@given(
    shape=st.sampled_from([(1, 1), (5, 7), (3, 9, 4), (16, 16)]),
    block_size=st.sampled_from([1, 3, 4, 128]),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_no_number_is_off_by_more_than_a_sixteenth_or_the_least_step(
    shape, block_size, seed, scale
):
    generator = torch.Generator().manual_seed(seed)
    weight = scale * torch.randn(shape, generator=generator)
    rounded = fp8_rounded(weight, block_size=block_size)
    assert rounded.shape == weight.shape
    least = weight.abs().max() / 448 * 2**-9
    assert bool(((rounded - weight).abs() <= weight.abs() / 16 + least).all())
    torch.testing.assert_close(
        fp8_rounded(rounded, block_size=block_size), rounded, rtol=1e-6, atol=0
    )


def test_a_block_size_that_is_none_is_refused():
    with pytest.raises(ContractError, match="block_size=0 has to be at least 1"):
        fp8_rounded(torch.ones(2, 2), block_size=0)


def test_rows_have_scales_of_their_own_however_they_are_stacked():
    rows = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0))
    rounded = fp8_rounded_rows(rows, block_size=4)
    alone = [fp8_rounded(row[None], block_size=4)[0] for row in rows.view(6, 10)]
    assert torch.equal(rounded.view(6, 10), torch.stack(alone))
