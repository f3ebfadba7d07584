"""FP8 in blocks, as inference servers hold weights and caches: what is left of a matrix, or of rows, stored so.

::

    s  = max_block |w| / 448            448 is the largest number of e4m3
    w^ = e4m3(w / s) * s                three bits of mantissa: off by at most 1/16, where not below the least exponent

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3 (e4m3 everywhere, weights in blocks of 128 x 128, activations in
blocks of 1 x 128, as caches of MLA are stored too).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longarc.errors import ContractError

MAX_E4M3 = 448.0
BLOCK_SIZE = 128
"""Rows and columns that share a scale."""


def fp8_rounded(
    weight: Float[Tensor, "*stack rows columns"], *, block_size: int = BLOCK_SIZE
) -> Float[Tensor, "*stack rows columns"]:
    """Return the values that e4m3 and one scale a block leave of a matrix, or of several of one shape.

    Rounding what is rounded already changes nothing but the last bits of a scale. Without a gradient.

    Args:
        weight: finite; the last blocks of a row or column may be smaller.
        block_size: rows and columns of a block, at least 1.

    Raises:
        ContractError: the block size is none.
    """
    return _rounded(weight, block_size, block_size)


def fp8_rounded_rows(
    rows: Float[Tensor, "*batch rows width"], *, block_size: int = BLOCK_SIZE
) -> Float[Tensor, "*batch rows width"]:
    """Return what e4m3 leaves of rows in which ``block_size`` neighbouring numbers share a scale. Without a gradient.

    Args:
        rows: finite; the last block of a row may be smaller.
        block_size: numbers of a block, at least 1.

    Raises:
        ContractError: the block size is none.
    """
    return _rounded(rows, 1, block_size)


def _rounded(weight: Tensor, block_rows: int, block_columns: int) -> Tensor:
    if block_columns < 1:
        raise ContractError(f"block_size={block_columns} has to be at least 1; 128 is usual")
    rows, columns = weight.shape[-2:]
    values = weight.detach().float()
    padded = F.pad(values, (0, -columns % block_columns, 0, -rows % block_rows))
    num_rows, num_columns = padded.shape[-2] // block_rows, padded.shape[-1] // block_columns
    blocks = padded.view(*weight.shape[:-2], num_rows, block_rows, num_columns, block_columns)
    largest = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    # A block of zeros stays one, whatever it is divided by.
    scales = torch.where(largest > 0, largest / MAX_E4M3, 1.0)
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    rounded: Tensor = (codes.float() * scales).view(padded.shape)[..., :rows, :columns]
    return rounded.to(weight.dtype)
