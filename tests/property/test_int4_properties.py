"""What holds for INT4 rounding of any matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longarc.algos.int4 import (
    int4_dequantised,
    int4_quantised,
    int4_rounded,
    packed_int4,
    unpacked_int4,
)
from longarc.errors import ContractError


@st.composite
def matrices(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    scale = 10.0 ** draw(st.integers(-7, 4))
    return torch.randn(rows, 8 * groups, generator=generator) * scale


@given(matrices())
def test_codes_fit_and_values_are_within_half_a_step(weight):
    codes, scales = int4_quantised(weight, 8)
    assert codes.abs().max() <= 7
    step = scales.float().repeat_interleave(8, dim=1)
    # Half a step, and the roundings to bf16 of weight, scale and product.
    error = (int4_dequantised(codes, scales).float() - weight).abs()
    assert bool((error <= 0.5 * step + 7 * step * 2**-7 + weight.abs() * 2**-7).all())


@given(matrices())
def test_quantising_what_was_dequantised_changes_nothing(weight):
    codes, scales = int4_quantised(weight, 8)
    again, same_scales = int4_quantised(int4_dequantised(codes, scales), 8)
    assert torch.equal(codes, again)
    assert torch.equal(scales, same_scales)


@given(matrices())
def test_the_forward_pass_has_what_packed_codes_and_scales_stand_for(weight):
    codes, scales = int4_quantised(weight, 8)
    exported = int4_dequantised(unpacked_int4(packed_int4(codes)), scales)
    assert torch.equal(int4_rounded(weight, 8), exported.float())


@given(matrices())
def test_a_stack_is_quantised_matrix_by_matrix(weight):
    stack = torch.stack([weight, 3 * weight])
    assert torch.equal(int4_rounded(stack, 8)[1], int4_rounded(3 * weight, 8))


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ContractError, match=r"\[2, 12\] has no whole groups of 8.*divides 12"):
        int4_quantised(torch.zeros(2, 12), 8)
    with pytest.raises(ContractError, match="rows of 12 codes"):
        packed_int4(torch.zeros(2, 12, dtype=torch.int8))
