"""Rounding to bfloat16 in front of a product, where no native kernel does it."""

from typing import Any

import torch
from torch import Tensor

from longarc.config.model import ComputeDtype


def rounded(x: Tensor, compute_dtype: ComputeDtype) -> Tensor:
    """Return what a product in that dtype computes with; gradients pass as if nothing had been rounded.

    The dtype of the tensor stays: a product of two rounded tensors is summed in it.
    """
    if compute_dtype == "float32":
        return x
    output: Tensor = _Rounded.apply(x)  # type: ignore[no-untyped-call]
    return output


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
