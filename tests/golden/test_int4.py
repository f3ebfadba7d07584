"""INT4 rounding by hand: every group is chosen so that its codes can be checked on paper."""

import torch

from longarc.algos.int4 import (
    int4_dequantised,
    int4_linear,
    int4_quantised,
    packed_int4,
    unpacked_int4,
)

# Largest 7: s = 7 * fp32(1/7) = 1.0000000149 -> 1.0 in fp32. Ties at .5 go to the even integer.
TIES = [7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0]
TIE_CODES = [7, 0, 2, 2, 0, -2, -2, 0]
# Largest 0.75: fp32(1/7) = 9586981 / 2^26, times 0.75 rounds to s = 14380472 / 2^27 = 0.10714287 in fp32 and
# to 219 / 2048 in bf16. 0.375 / s = 3.5 - 2.8e-7 is 3; by the bf16 scale it would be 3.507, which is 4.
ROUNDED = [0.75, -0.75, 0.16, 0.375, 0.0, 0.0, 0.0, 0.0]
ROUNDED_CODES = [7, -7, 1, 3, 0, 0, 0, 0]
# All below the smallest scale: s = 1e-5, and 2e-5 / 1e-5 = 2.
TINY = [2e-5, -1e-5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_codes_are_rounded_to_even_with_the_scale_in_fp32():
    codes, scales = int4_quantised(torch.tensor([TIES + ROUNDED]), 8)
    assert codes.tolist() == [TIE_CODES + ROUNDED_CODES]
    assert scales.dtype == torch.bfloat16
    assert scales.float().tolist() == [[1.0, 219 / 2048]]


def test_values_are_products_in_bfloat16_of_the_rounded_scale():
    values = int4_dequantised(*int4_quantised(torch.tensor([ROUNDED]), 8))
    # 7 * 219/2048 = 191.63/256, and bf16 has steps of 1/256 there.
    assert values.dtype == torch.bfloat16
    assert values.float().tolist()[0][:3] == [0.75, -0.75, 219 / 2048]


def test_the_scale_has_a_floor():
    codes, scales = int4_quantised(torch.tensor([TINY]), 8)
    assert codes.tolist()[0][:2] == [2, -1]
    assert scales.float().item() == torch.tensor(1e-5).bfloat16().float().item()


def test_eight_codes_fill_a_word_from_its_lowest_bits():
    codes = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, -1]], dtype=torch.int8)
    # Nibbles, first one lowest: 0 1 8 F 9 A B 7
    assert packed_int4(codes).tolist() == [[0x7BA9F810]]
    high = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 7]], dtype=torch.int8)
    assert packed_int4(high).tolist() == [[0xF8888888 - (1 << 32)]]
    assert torch.equal(unpacked_int4(packed_int4(codes)), codes)
    assert torch.equal(unpacked_int4(packed_int4(high)), high)


def test_the_gradient_passes_as_if_nothing_had_been_rounded():
    weight = torch.tensor([TIES], requires_grad=True)
    grad = torch.linspace(-3, 5, 8)[None]
    product = int4_linear(torch.eye(8), weight, 8)
    assert product.flatten().tolist() == TIE_CODES
    (product * grad.T).sum().backward()
    assert torch.equal(weight.grad, grad)


def test_a_gradient_goes_back_through_the_rounded_matrix():
    x = torch.ones(1, 8, requires_grad=True)
    int4_linear(x, torch.tensor([TIES]), 8).sum().backward()
    assert x.grad.flatten().tolist() == TIE_CODES
