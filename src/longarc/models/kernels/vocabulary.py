"""Log-probabilities of tokens and sampled tokens; both run the same log-softmax, so they agree bitwise.

The eager twins are ``token_logprobs`` in ``longarc.models.projection`` and ``sample`` in
``longarc.engine.sampler``.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.config.model import ComputeDtype
from longarc.models.kernels.native import check_ids, required

PACKED_FLOATS = 1 << 24
"""Weights of up to so many numbers are packed once; larger ones piece by piece, over and over, because a
packed copy would be as large as the model's largest matrix [numbers]."""


def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " tokens"],
    *,
    temperature: float,
    with_entropy: bool,
    compute_dtype: ComputeDtype = "float32",
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " entropies"]]:
    """Return log-probabilities [nats] of the targets, and entropies (or nothing) without gradient."""
    check_ids(targets, len(weight))
    output: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, with_entropy, compute_dtype
    )
    return output


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        compute_dtype: ComputeDtype,
    ) -> tuple[Tensor, Tensor]:
        hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
        rows, width = hidden.shape
        logprobs, log_sums = hidden.new_empty(rows), hidden.new_empty(rows)
        entropy = hidden.new_empty(rows if with_entropy else 0)
        packed = None
        if weight.numel() <= PACKED_FLOATS:
            packed = required().packed(weight, compute_dtype=compute_dtype)
        required().call(
            "logprobs",
            *(rows, weight.shape[0], width, hidden, weight, packed, targets, temperature),
            *(logprobs, log_sums, entropy if with_entropy else None),
            *(compute_dtype == "bfloat16", torch.get_num_threads()),
        )
        ctx.save_for_backward(hidden, weight, targets, log_sums, packed)
        ctx.temperature, ctx.compute_dtype = temperature, compute_dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, packed = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        required().call(
            "logprobs_backward",
            *(*hidden.shape[:1], weight.shape[0], weight.shape[1]),
            *(hidden, weight, packed, targets, ctx.temperature, log_sums, grad.contiguous()),
            *(grad_hidden, grad_weight),
            *(ctx.compute_dtype == "bfloat16", torch.get_num_threads()),
        )
        return grad_hidden, grad_weight, None, None, None, None


def sample_rows(
    logits_BV: Float[Tensor, "B V"],
    temperatures_B: Float[Tensor, " B"],
    uniforms_B: Float[Tensor, " B"],
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Draw a token per row at its uniform number in [0, 1); temperature 0 takes the maximum.

    ``logits_BV`` is fp32 and contiguous and is overwritten; uniforms are fp64.

    Returns:
        Tokens, their log-probabilities [nats], and whether the row was finite.
    """
    rows, vocab = logits_BV.shape
    tokens_B = torch.empty(rows, dtype=torch.long)
    finite_B = torch.empty(rows, dtype=torch.long)
    logprobs_B = torch.empty(rows)
    required().call(
        "sample",
        *(rows, vocab, logits_BV, temperatures_B, uniforms_B, tokens_B, logprobs_B, finite_B),
        torch.get_num_threads(),
    )
    return tokens_B, logprobs_B, finite_B.bool()
