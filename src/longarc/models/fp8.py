"""Makes a model compute as if its matrices were stored in FP8: the numbers are rounded, the arithmetic stays.

Rounded are the matrices of attention, indexers, feed-forwards and experts. Embedding, output head, router, the weights of
index heads, convolutions, norms and biases stay, as inference servers leave them in more bits.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3 (which parts keep their precision).
"""

import torch
from torch import Tensor, nn

from longarc.algos.fp8 import fp8_rounded
from longarc.errors import ContractError
from longarc.models.decoder_base import Decoder

_KEPT = "weights_proj"
"""Weights of index heads."""


def round_to_fp8(model: Decoder) -> int:
    """Round matrices in place, in blocks of 128 x 128; return how many.

    Raises:
        ContractError: there is none that could be rounded.
    """
    matrices = _matrices(model)
    if not matrices:
        raise ContractError(
            f"a {model.config.family} model has no matrices to round to FP8; sample without it"
        )
    with torch.no_grad():
        for matrix in matrices:
            for one in matrix.unbind() if matrix.dim() == 3 else (matrix,):
                # One expert after another: a copy of all of them would be the largest tensor there is.
                one.copy_(fp8_rounded(one))
    return len(matrices)


def _matrices(model: Decoder) -> list[Tensor]:
    found: list[Tensor] = []
    # Without the output head, and without the MTP layer, which never samples.
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] != _KEPT:
            found.append(module.weight)
        for stacked in ("gate_up_proj", "down_proj"):
            weight = getattr(module, stacked, None)
            if isinstance(weight, Tensor) and weight.dim() == 3:
                found.append(weight)
    return found
