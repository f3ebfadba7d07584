"""From the hidden states of multi-token prediction to losses, a chunk of tokens at a time.

Main model and draft share the output projection. Logits are computed chunk by chunk, and again in backward,
so no [tokens, vocab] tensor exists. The losses themselves are in ``longarc.algos.mtp``.

Which row predicts what: the main model's state of row i predicts token i + 1. Draft step g (from 0) of row
i predicts token i + 2 + g, and so does the main model's state of row i + 1 + g, which decides on it.

Shape letters: G draft steps, T rows of one pack, C rows of a chunk, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.errors import ContractError
from longarc.models.projection import project_logits, token_logprobs


def mtp_cross_entropy(
    draft_hidden: Float[Tensor, "G T hidden"],
    weight: Float[Tensor, "vocab hidden"],
    token_ids: Int[Tensor, " T"],
    is_valid: Bool[Tensor, "G T"],
    *,
    chunk_tokens: int = 512,
) -> Float[Tensor, "G T"]:
    """Return ``-log q(token)`` [nats] of each draft step, 0 where it is not valid.

    The mean over the valid steps is the loss. Only valid rows are computed.

    Args:
        draft_hidden: final state of each step; carries gradient.
        weight: output projection; carries gradient.
        token_ids: of the pack.
        is_valid: whether the token that a step predicts is in the document of its row, and trained.
        chunk_tokens: rows whose logits exist at a time.

    Raises:
        ContractError: a valid step predicts a token behind the end of the pack, or outside the vocabulary.
    """
    num_steps, num_rows = is_valid.shape
    target = torch.arange(num_rows, device=token_ids.device)[None] + torch.arange(
        2, 2 + num_steps, device=token_ids.device
    ).unsqueeze(1)
    if bool((is_valid & (target >= num_rows)).any()):
        raise ContractError(
            f"a draft step is marked valid whose token lies behind the {num_rows} tokens of the pack; "
            f"step g of row i predicts token i + 2 + g, so the last 2 + g rows have no target"
        )
    logprobs, _ = token_logprobs(
        draft_hidden[is_valid], weight, token_ids[target[is_valid]], chunk_tokens=chunk_tokens
    )
    return logprobs.new_zeros(num_steps, num_rows).masked_scatter(is_valid, -logprobs)


def mtp_acceptance(
    draft_hidden: Float[Tensor, "G T hidden"],
    main_hidden: Float[Tensor, "T hidden"],
    weight: Float[Tensor, "vocab hidden"],
    *,
    chunk_tokens: int = 512,
) -> Float[Tensor, "G T"]:
    """Return with which probability the main model accepts each draft token; 0 behind the end of the pack.

    ``alpha = sum_v min(sg[p(v)], q(v))`` at temperature 1; see :func:`longarc.algos.mtp.acceptance`. The
    main model's probabilities of a chunk serve all draft steps.

    Args:
        draft_hidden: final state of each step; carries gradient.
        main_hidden: final state of the main model; constant.
        weight: output projection of both; carries the gradient of the draft.
        chunk_tokens: rows whose logits exist at a time, once for the main model and once for a draft step.
    """
    alpha: Tensor = _Acceptance.apply(  # type: ignore[no-untyped-call]
        draft_hidden, main_hidden, weight, chunk_tokens
    )
    return alpha


class _Acceptance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, draft_hidden: Tensor, main_hidden: Tensor, weight: Tensor, chunk_tokens: int
    ) -> Tensor:
        dtype = torch.promote_types(draft_hidden.dtype, torch.float32)
        alpha_GT = draft_hidden.new_zeros(draft_hidden.shape[:2], dtype=dtype)
        for step, rows, p_CV, q_CV in _chunks(draft_hidden, main_hidden, weight, chunk_tokens):
            alpha_GT[step, rows] = torch.minimum(p_CV, q_CV).sum(dim=1)
        ctx.save_for_backward(draft_hidden, main_hidden, weight)
        ctx.chunk_tokens = chunk_tokens
        return alpha_GT

    @staticmethod
    def backward(ctx: Any, grad_GT: Tensor) -> tuple[Tensor | None, ...]:
        draft_hidden, main_hidden, weight = ctx.saved_tensors
        needs_draft, _, needs_weight, _ = ctx.needs_input_grad
        grad_draft = torch.zeros_like(draft_hidden) if needs_draft else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        for step, rows, p_CV, q_CV in _chunks(draft_hidden, main_hidden, weight, ctx.chunk_tokens):
            below_CV = torch.where(q_CV <= p_CV, q_CV, 0.0)
            grad_logits = below_CV.sub_(q_CV.mul_(below_CV.sum(dim=1, keepdim=True)))
            grad_logits = grad_logits.mul_(grad_GT[step, rows, None]).to(weight.dtype)
            if grad_draft is not None:
                grad_draft[step, rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.mT, draft_hidden[step, rows])
        return grad_draft, None, grad_weight, None


def _chunks(
    draft_hidden: Tensor, main_hidden: Tensor, weight: Tensor, chunk_tokens: int
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield step, rows, and for them the probabilities of the main model and of the draft."""
    num_steps, num_rows = draft_hidden.shape[:2]
    for start in range(0, num_rows - 1, chunk_tokens):
        stop = min(start + chunk_tokens, num_rows)
        main_rows = main_hidden[start + 1 : stop + num_steps]
        p_CV = project_logits(main_rows, weight).softmax(dim=1)
        for step in range(min(num_steps, num_rows - 1 - start)):
            rows = slice(start, min(stop, num_rows - 1 - step))
            q_CV = project_logits(draft_hidden[step, rows], weight).softmax(dim=1)
            yield step, rows, p_CV[step : step + len(q_CV)], q_CV
