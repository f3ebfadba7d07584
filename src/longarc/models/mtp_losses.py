"""From the states of drafts to what their losses are made of, a chunk of targets at a time.

Main model and draft share the output projection. Logits are computed chunk by chunk, and again in backward,
so no [targets, vocab] tensor exists. The losses themselves are in ``longarc.algos.mtp``.

Column m of everything predicts one and the same token, target m: the draft's states of all depths, and the
main model's state, whose probabilities decide which drafts are accepted.

Shape letters: G draft depths, M targets, C targets of a chunk, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.models.layers import check_ids
from longarc.models.projection import chunk_size, project_logits

_NUM_TABLES = 4
"""By which chunks are smaller than a projection's: main model, draft and gradient have about five tables of
C times V at a time."""


def draft_scores(
    draft_hidden: Float[Tensor, "G M hidden"],
    main_hidden: Float[Tensor, "M hidden"],
    weight: Float[Tensor, "vocab hidden"],
    target_ids: Int[Tensor, " M"],
    *,
    chunk_tokens: int | None = None,
) -> tuple[Float[Tensor, "G M"], Float[Tensor, "G M"]]:
    """Return what every draft gives the token of the text, and how likely the main model accepts a draft.

    ``log q(token)`` [nats], of which cross-entropy is made, and ``alpha = sum_v min(sg[p(v)], q(v))``, of which
    the TV losses are (:func:`longarc.algos.mtp.acceptance`), both at temperature 1.

    Args:
        draft_hidden: state of each depth that predicts the target; carries gradient.
        main_hidden: state of the main model that predicts it; constant.
        weight: output projection of both; carries the gradient of the draft.
        target_ids: the token of the text.
        chunk_tokens: targets whose logits exist at a time, once for the main model and once for a depth; None
            takes as many as `longarc.models.projection.LOGIT_FLOATS` allows.

    Raises:
        ContractError: a target is outside the vocabulary.
    """
    if len(target_ids):
        check_ids(target_ids, weight.shape[0])
    scores: tuple[Tensor, Tensor] = _DraftScores.apply(  # type: ignore[no-untyped-call]
        draft_hidden,
        main_hidden,
        weight,
        target_ids,
        chunk_tokens or chunk_size(weight.shape[0], num_tables=_NUM_TABLES),
    )
    return scores


class _DraftScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft_hidden: Tensor,
        main_hidden: Tensor,
        weight: Tensor,
        target_ids: Tensor,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(draft_hidden.dtype, torch.float32)
        logprobs_GM = draft_hidden.new_empty(draft_hidden.shape[:2], dtype=dtype)
        alpha_GM = torch.empty_like(logprobs_GM)
        for chunk in _chunks(len(target_ids), chunk_tokens):
            p_CV = project_logits(main_hidden[chunk], weight).softmax(dim=1)
            for depth, hidden in enumerate(draft_hidden):
                q_CV = project_logits(hidden[chunk], weight).log_softmax(dim=1)
                logprobs_GM[depth, chunk] = q_CV.gather(1, target_ids[chunk, None])[:, 0]
                alpha_GM[depth, chunk] = torch.minimum(p_CV, q_CV.exp_()).sum(dim=1)
        ctx.save_for_backward(draft_hidden, main_hidden, weight, target_ids)
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs_GM, alpha_GM

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_alpha: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        draft_hidden, main_hidden, weight, target_ids = ctx.saved_tensors
        needs_draft, _, needs_weight, *_rest = ctx.needs_input_grad
        grad_draft = torch.zeros_like(draft_hidden) if needs_draft else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        for chunk in _chunks(len(target_ids), ctx.chunk_tokens):
            p_CV = None
            if grad_alpha is not None:  # cross-entropy does not ask the main model
                p_CV = project_logits(main_hidden[chunk], weight).softmax(dim=1)
            for depth, hidden in enumerate(draft_hidden):
                q_CV = project_logits(hidden[chunk], weight).softmax(dim=1)
                grad_logits = torch.zeros_like(q_CV)
                if p_CV is not None and grad_alpha is not None:
                    below_CV = torch.where(q_CV <= p_CV, q_CV, 0.0)
                    below_CV.sub_(q_CV * below_CV.sum(dim=1, keepdim=True))
                    grad_logits.add_(below_CV.mul_(grad_alpha[depth, chunk, None]))
                if grad_logprobs is not None:
                    scale = grad_logprobs[depth, chunk, None]
                    grad_logits.sub_(q_CV.mul_(scale)).scatter_add_(
                        1, target_ids[chunk, None], scale
                    )
                grad_logits = grad_logits.to(weight.dtype)
                if grad_draft is not None:
                    grad_draft[depth, chunk] = grad_logits @ weight
                if grad_weight is not None:
                    grad_weight.addmm_(grad_logits.mT, hidden[chunk])
        return grad_draft, None, grad_weight, None, None


def _chunks(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_rows, size))
