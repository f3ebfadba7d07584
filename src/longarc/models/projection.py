"""From hidden states to log-probabilities, a chunk of tokens at a time: no [tokens, vocab] tensor exists."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.config.model import ComputeDtype
from longarc.models.kernels import rows as native_rows
from longarc.models.kernels import vocabulary as native_vocabulary
from longarc.models.kernels.native import native_for
from longarc.models.layers import ROW_MULTIPLE, check_ids, pad_rows, padded_rows
from longarc.models.rounding import product, rounded

LOGIT_FLOATS = 1 << 25
"""Logits that exist at a time where nobody chooses a chunk [numbers]; a few times that is the peak."""
MAX_CHUNK_TOKENS = 512
"""Larger chunks are not faster."""


def project_logits(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    *,
    compute_dtype: ComputeDtype = "float32",
) -> Float[Tensor, "tokens vocab"]:
    """Return logits in fp32 or better; a token's row does not depend on how many rows there are."""
    if native_for(hidden, weight):
        return native_rows.linear(hidden, weight, compute_dtype=compute_dtype)
    logits = product(pad_rows(hidden, padded_rows(len(hidden))), weight, compute_dtype)
    return logits[: len(hidden)].to(torch.promote_types(logits.dtype, torch.float32))


def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    compute_dtype: ComputeDtype = "float32",
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"] | None]:
    """Return ``log softmax(hidden weight^T / temperature)`` at the targets.

    Logits are computed chunk by chunk, and again in backward, so memory does not grow with
    ``tokens * vocab``.

    Args:
        hidden: final hidden state before each target; carries gradient.
        weight: output projection; carries gradient.
        targets: the token whose probability is asked for, per row.
        temperature: of the distribution; above 0.
        chunk_tokens: rows whose logits exist at a time; None takes as many as `LOGIT_FLOATS` allows. The
            native kernels choose for themselves.
        with_entropy: also return the entropy [nats] of each row's distribution.
        compute_dtype: of the projection; the model's own.

    Returns:
        log-probabilities [nats], and entropies without gradient or None.

    Raises:
        ContractError: a target is outside the vocabulary.
    """
    if len(targets):
        check_ids(targets, weight.shape[0])
    if native_for(hidden, weight):
        logprobs, entropy = native_vocabulary.token_logprobs(
            hidden,
            weight,
            targets,
            temperature=temperature,
            with_entropy=with_entropy,
            compute_dtype=compute_dtype,
        )
        return logprobs, entropy if with_entropy else None
    output: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        targets,
        temperature,
        chunk_tokens or chunk_size(weight.shape[0]),
        with_entropy,
        compute_dtype,
    )
    logprobs, entropy = output
    return logprobs, entropy if with_entropy else None


def chunk_size(vocab_size: int, *, num_tables: int = 1) -> int:
    """Return how many tokens to take at a time [tokens].

    Args:
        vocab_size: width of a token's logits.
        num_tables: how many projections exist at a time.
    """
    whole = LOGIT_FLOATS // (num_tables * vocab_size) // ROW_MULTIPLE * ROW_MULTIPLE
    return max(ROW_MULTIPLE, min(MAX_CHUNK_TOKENS, whole))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        compute_dtype: ComputeDtype,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        entropy = hidden.new_empty(len(hidden) if with_entropy else 0, dtype=dtype)
        log_sum = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = project_logits(hidden[chunk], weight, compute_dtype=compute_dtype)
            if temperature != 1.0:
                logits.div_(temperature)
            log_sum[chunk] = logits.logsumexp(dim=1)
            logprobs[chunk] = logits.gather(1, targets[chunk, None])[:, 0] - log_sum[chunk]
            if with_entropy:
                probability = (logits - log_sum[chunk, None]).exp_()
                # xlogy's cousin: a banned token has p = 0 and logit -inf, and adds nothing.
                expected = logits.masked_fill_(probability == 0, 0.0).mul_(probability).sum(dim=1)
                entropy[chunk] = log_sum[chunk] - expected
        ctx.save_for_backward(hidden, weight, targets, log_sum)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.compute_dtype = compute_dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum = ctx.saved_tensors
        needs_hidden, needs_weight, *_rest = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        factor = rounded(weight, ctx.compute_dtype)
        for start in range(0, len(hidden), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits = project_logits(hidden[chunk], weight, compute_dtype=ctx.compute_dtype)
            logits.div_(ctx.temperature)
            scale = (grad[chunk] / ctx.temperature)[:, None]
            grad_logits = logits.sub_(log_sum[chunk, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(1, targets[chunk, None], scale)
            grad_logits = rounded(grad_logits.to(weight.dtype), ctx.compute_dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ factor
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.mT, rounded(hidden[chunk], ctx.compute_dtype))
        return grad_hidden, grad_weight, None, None, None, None, None
