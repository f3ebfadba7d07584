"""Row-wise operations with gradients: product, norm, rotation, feed-forward, and the product per head.

Their eager twins are the plain torch expressions in ``longarc.models``. All inputs are fp32 on the CPU;
the callers check that with ``native_for``. With ``compute_dtype="bfloat16"`` the factors of a product, in backward
too, are rounded to bfloat16; what it sums, gradients included, is fp32.
Shape letters: T rows, n heads, d width.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longarc.config.model import ComputeDtype
from longarc.models.kernels.native import required


def linear(
    x: Float[Tensor, "T inputs"],
    weight: Float[Tensor, "outputs inputs"],
    *,
    compute_dtype: ComputeDtype = "float32",
) -> Float[Tensor, "T outputs"]:
    """Return ``x weight^T``; a row's numbers depend on that row alone."""
    output: Tensor = _HeadProduct.apply(x[None], weight[None], compute_dtype)  # type: ignore[no-untyped-call]
    return output[0]


def head_product(
    x: Float[Tensor, "T n inputs"], weight: Float[Tensor, "n outputs inputs"]
) -> Float[Tensor, "T n outputs"]:
    """Return ``x[:, h] weight[h]^T`` for every head."""
    output: Tensor = _HeadProduct.apply(x.transpose(0, 1), weight, "float32")  # type: ignore[no-untyped-call]
    return output.transpose(0, 1)


class _HeadProduct(torch.autograd.Function):
    """Batched product; the result lies in memory as [T, n, outputs]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, compute_dtype: ComputeDtype) -> Tensor:
        x = _dense_rows(x)
        ctx.save_for_backward(x, weight)
        ctx.compute_dtype = compute_dtype
        heads, rows, _ = x.shape
        output = x.new_empty(rows, heads, weight.shape[1]).transpose(0, 1)
        product(x, weight, output, compute_dtype=compute_dtype)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = _dense_rows(grad)
        heads, rows, inputs = x.shape
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = x.new_empty(rows, heads, inputs).transpose(0, 1)
            product(grad, weight.mT, grad_x, compute_dtype=ctx.compute_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = weight.new_empty(weight.shape)
            weight_gradient(grad, x, grad_weight, compute_dtype=ctx.compute_dtype)
        return grad_x, grad_weight, None


def product(
    x: Tensor, weight: Tensor, output: Tensor, *, compute_dtype: ComputeDtype = "float32"
) -> None:
    """Set ``output[b] = x[b] weight[b]^T``; rows of ``x`` and ``output`` are without gaps, strides free."""
    batches, rows, inputs = x.shape
    weight_batch, weight_row, weight_column = weight.stride()
    required().call(
        "product",
        *(batches, rows, output.shape[2], inputs),
        *(x, x.stride(0), x.stride(1)),
        *(weight, weight_batch, weight_row, weight_column),
        *(output, output.stride(0), output.stride(1)),
        compute_dtype == "bfloat16",
        torch.get_num_threads(),
    )


def weight_gradient(
    grad: Tensor, x: Tensor, grad_weight: Tensor, *, compute_dtype: ComputeDtype = "float32"
) -> None:
    """Set the contiguous ``grad_weight[b]`` to ``grad[b]^T x[b]``."""
    batches, rows, inputs = x.shape
    required().call(
        "product_weight",
        *(batches, rows, grad.shape[2], inputs),
        *(grad, grad.stride(0), grad.stride(1)),
        *(x, x.stride(0), x.stride(1)),
        *(grad_weight, grad_weight.stride(0)),
        compute_dtype == "bfloat16",
        torch.get_num_threads(),
    )


def _dense_rows(x: Tensor) -> Tensor:
    """Make the last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(
    x: Float[Tensor, "T d"], weight: Float[Tensor, " d"], eps: float
) -> Float[Tensor, "T d"]:
    """Return ``weight * x / sqrt(mean(x^2) + eps)``."""
    output: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return output


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = _dense_rows(x)
        rows, width = x.shape
        output, factors = x.new_empty(rows, width), x.new_empty(rows)
        required().call(
            "rms_norm",
            *(rows, width, x, x.stride(0), weight, eps, output, width, factors),
            torch.get_num_threads(),
        )
        ctx.save_for_backward(x, weight, factors)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        grad = _dense_rows(grad)
        rows, width = x.shape
        parts = torch.get_num_threads()
        grad_x, grad_parts = x.new_empty(rows, width), weight.new_zeros(parts, width)
        required().call(
            "rms_norm_backward",
            *(rows, width, x, x.stride(0), weight, grad, grad.stride(0), factors),
            *(grad_x, grad_parts, parts),
        )
        return grad_x, grad_parts.sum(dim=0), None


def layer_norm(
    x: Float[Tensor, "T d"], weight: Float[Tensor, " d"], bias: Float[Tensor, " d"], eps: float
) -> Float[Tensor, "T d"]:
    """Return the layer norm of each row; has no gradient."""
    x = _dense_rows(x)
    rows, width = x.shape
    output = x.new_empty(rows, width)
    required().call("layer_norm", rows, width, x, x.stride(0), weight, bias, eps, output, width)
    return output


def rotate(
    x: Float[Tensor, "T n d"],
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    *,
    interleaved: bool,
) -> Float[Tensor, "T n d"]:
    """Turn every pair of every head by its row's angles."""
    output: Tensor = _Rotate.apply(x, cos, sin, interleaved, 1.0)  # type: ignore[no-untyped-call]
    return output


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float
    ) -> Tensor:
        x = _dense_rows(x)
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.sign = interleaved, sign
        rows, heads, width = x.shape
        output = x.new_empty(rows, heads, width)
        required().call(
            "rotate",
            *(rows, heads, width, x, x.stride(0), x.stride(1)),
            *(cos, sin, interleaved, sign, output, output.stride(0), output.stride(1)),
        )
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        turned: Tensor = _Rotate.apply(grad, cos, sin, ctx.interleaved, -ctx.sign)  # type: ignore[no-untyped-call]
        return turned, None, None, None, None


def feed_forward(
    x: Float[Tensor, "T hidden"],
    gate: Float[Tensor, "width hidden"],
    up: Float[Tensor, "width hidden"],
    down: Float[Tensor, "hidden width"],
    *,
    compute_dtype: ComputeDtype = "float32",
) -> Float[Tensor, "T hidden"]:
    """Return ``down(silu(gate x) * up x)``."""
    output: Tensor = _FeedForward.apply(x, gate, up, down, compute_dtype)  # type: ignore[no-untyped-call]
    return output


class _FeedForward(torch.autograd.Function):
    """Keeps gate and up of every row; the activation is computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, compute_dtype: ComputeDtype
    ) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape[0], gate.shape[0]
        gate_up = x.new_empty(rows, 2 * width)
        product(x[None], gate[None], gate_up[None, :, :width], compute_dtype=compute_dtype)
        product(x[None], up[None], gate_up[None, :, width:], compute_dtype=compute_dtype)
        activated = x.new_empty(rows, width)
        required().call("swiglu", rows, width, gate_up, activated, torch.get_num_threads())
        output = x.new_empty(rows, down.shape[0])
        product(activated[None], down[None], output[None], compute_dtype=compute_dtype)
        ctx.save_for_backward(x, gate, up, down, gate_up)
        ctx.compute_dtype = compute_dtype
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, gate_up = ctx.saved_tensors
        back = partial(product, compute_dtype=ctx.compute_dtype)
        of_weight = partial(weight_gradient, compute_dtype=ctx.compute_dtype)
        grad = _dense_rows(grad)
        rows, width = x.shape[0], gate.shape[0]
        grad_activated, activated = x.new_empty(rows, width), x.new_empty(rows, width)
        back(grad[None], down.mT[None], grad_activated[None])
        grad_gate_up = torch.empty_like(gate_up)
        required().call(
            "swiglu_backward",
            *(rows, width, gate_up, grad_activated, grad_gate_up, activated),
            torch.get_num_threads(),
        )
        grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        grad_down = down.new_empty(down.shape)
        of_weight(grad[None], activated[None], grad_down[None])
        of_weight(grad_gate_up[None, :, :width], x[None], grad_gate[None])
        of_weight(grad_gate_up[None, :, width:], x[None], grad_up[None])
        grad_x, from_up = torch.empty_like(x), torch.empty_like(x)
        back(grad_gate_up[None, :, :width], gate.mT[None], grad_x[None])
        back(grad_gate_up[None, :, width:], up.mT[None], from_up[None])
        return grad_x.add_(from_up), grad_gate, grad_up, grad_down, None
