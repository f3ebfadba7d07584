"""Products whose factors are rounded to bfloat16, where no native kernel does it."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longarc.config.model import ComputeDtype


def product(
    x: Float[Tensor, "T inputs"],
    weight: Float[Tensor, "outputs inputs"],
    compute_dtype: ComputeDtype,
) -> Float[Tensor, "T outputs"]:
    """Return ``x weight^T`` of rounded factors; the products of its backward round theirs too.

    The dtype of the tensors stays, and sums and gradients are of it.
    """
    if compute_dtype == "float32":
        return F.linear(x, weight)
    summed = F.linear(rounded(x, compute_dtype), rounded(weight, compute_dtype))
    output: Tensor = _RoundedGradient.apply(summed)  # type: ignore[no-untyped-call]
    return output


def rounded(x: Tensor, compute_dtype: ComputeDtype) -> Tensor:
    """Return what a product in that dtype computes with; gradients pass as if nothing had been rounded."""
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


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(torch.bfloat16).to(grad.dtype)
