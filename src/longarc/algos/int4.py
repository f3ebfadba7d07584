"""INT4 weights in groups: one rule for the forward pass of quantisation-aware training and for the export.

::

    s  = max(max_group |w| * fp32(1/7), 1e-5)     in fp32, of w rounded to bf16
    q  = rint(w / s)                              true division in fp32, ties to even: -7..7
    w^ = q * bf16(s)                              product in bf16; bf16(s) and q are what is stored

Codes come from the fp32 scale and values from its bf16 rounding: with either one in both places, codes
would differ from those that inference was given. Weights are rounded to bf16 first, because then
quantising a dequantised matrix gives the same codes and scales again.

Source: GLM-5, arXiv:2602.15763, section 2.4 (INT4 QAT with one kernel for training and export); the rule
is that of slime's kernel and of the compressed-tensors format.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float, Int, Int8, Int32
from torch import Tensor

from longarc.errors import ContractError

MAX_CODE = 7
"""Codes are symmetric: -8 is not used."""
MIN_SCALE = 1e-5
CODES_PER_WORD = 8


def int4_quantised(
    weight: Float[Tensor, "*rows inputs"], group_size: int
) -> tuple[Int8[Tensor, "*rows inputs"], BFloat16[Tensor, "*rows groups"]]:
    """Return codes and scales of a matrix, or of several of one shape.

    Args:
        weight: finite; groups lie along its last dimension.
        group_size: numbers that share a scale; divides the last dimension.

    Raises:
        ContractError: it does not.
    """
    if weight.shape[-1] % group_size:
        raise ContractError(
            f"a matrix of shape {list(weight.shape)} has no whole groups of {group_size} numbers along its "
            f"last dimension; use a group size that divides {weight.shape[-1]}"
        )
    groups = weight.detach().to(torch.bfloat16).float()
    groups = groups.view(*weight.shape[:-1], -1, group_size)
    seventh = torch.tensor(1 / MAX_CODE, dtype=torch.float32, device=weight.device)
    scales = (groups.abs().amax(dim=-1) * seventh).clamp_min(MIN_SCALE)
    codes = (groups / scales[..., None]).round()
    return codes.to(torch.int8).flatten(-2), scales.to(torch.bfloat16)


def int4_dequantised(
    codes: Int8[Tensor, "*rows inputs"], scales: BFloat16[Tensor, "*rows groups"]
) -> BFloat16[Tensor, "*rows inputs"]:
    """Return the values that codes and scales stand for."""
    groups = codes.to(torch.bfloat16).view(*scales.shape, -1)
    values: Tensor = (groups * scales[..., None]).flatten(-2)
    return values


def int4_rounded(
    weight: Float[Tensor, "*rows inputs"], group_size: int
) -> Float[Tensor, "*rows inputs"]:
    """Return the values that the quantised weight has, in the dtype of ``weight`` and without a gradient.

    Raises:
        ContractError: ``group_size`` does not divide the last dimension.
    """
    return int4_dequantised(*int4_quantised(weight, group_size)).to(weight.dtype)


def int4_linear(
    x: Float[Tensor, "tokens inputs"], weight: Float[Tensor, "outputs inputs"], group_size: int
) -> Float[Tensor, "tokens outputs"]:
    """Return the product with what INT4 leaves of a matrix; the gradient passes through the rounding.

    The rounded matrix is computed again in backward and not kept until then.

    Raises:
        ContractError: ``group_size`` does not divide the inputs.
    """
    product: Tensor = _Int4Linear.apply(x, weight, group_size)  # type: ignore[no-untyped-call]
    return product


class _Int4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group_size: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group_size = group_size
        return F.linear(x, int4_rounded(weight, group_size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad.mm(int4_rounded(weight, ctx.group_size)), grad.t().mm(x), None


def packed_int4(codes: Int8[Tensor, "rows inputs"]) -> Int32[Tensor, "rows words"]:
    """Pack eight codes to a word, each plus 8 as an unsigned nibble, the first in the lowest bits.

    Raises:
        ContractError: a row is not made of whole words.
    """
    if codes.shape[1] % CODES_PER_WORD:
        raise ContractError(
            f"rows of {codes.shape[1]} codes do not fill words of {CODES_PER_WORD}; the matrix cannot be packed"
        )
    nibbles = (codes.to(torch.int64) + 8).view(len(codes), -1, CODES_PER_WORD)
    words = (nibbles << _shifts(codes.device)).sum(dim=-1)
    # Words of 2^31 and more are the negative numbers of int32.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpacked_int4(words: Int32[Tensor, "rows words"]) -> Int8[Tensor, "rows inputs"]:
    """Undo :func:`packed_int4`."""
    nibbles = (words.to(torch.int64)[..., None] >> _shifts(words.device)) & 15
    return (nibbles - 8).to(torch.int8).flatten(1)


def _shifts(device: torch.device) -> Int[Tensor, " codes"]:
    return torch.arange(0, 4 * CODES_PER_WORD, 4, device=device)
