"""Distillation over the vocabulary: every token the teacher might have said, or its likeliest, and not the sampled one.

The gradient needs no policy gradient and has no sampling noise; the price is the teacher's distribution at each
position. Shape letters: T tokens, V vocabulary, K kept tokens.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.clipping import summed_loss
from longarc.algos.token_loss import TokenLoss
from longarc.errors import ConfigError

Direction = Literal["reverse", "forward"]
"""reverse is KL(student || teacher), which seeks modes, as on-policy distillation; forward is KL(teacher || student)."""


def full_vocabulary_loss(
    policy_logits_TV: Float[Tensor, "T V"],
    teacher_logits_TV: Float[Tensor, "T V"],
    train_mask: Bool[Tensor, " T"],
    *,
    direction: Direction = "reverse",
    token_weights: Float[Tensor, " T"] | None = None,
) -> TokenLoss:
    """Return ``sum_t w_t KL(pi || pi_T)`` over the vocabulary, ``KL(pi_T || pi)`` where forward.

    In expectation over the policy's own tokens the reverse one has the gradient of
    :func:`~longarc.algos.distill.distillation_advantages`.

    Source: GKD, Agarwal et al. (arXiv:2306.13649); MiniLLM (arXiv:2306.08543).

    Args:
        policy_logits_TV: of the student, divided by the temperature; carries gradient.
        teacher_logits_TV: of the teacher, divided by the same temperature; constant. -inf is a token that the
            teacher never says; a student that says it all the same has an infinite reverse KL.
        train_mask: True on trained tokens; rows of others may be anything.
        direction: which of the two distributions is averaged over.
        token_weights: 1 for a token mean (the default).
    """
    policy_TV = policy_logits_TV.masked_fill(~train_mask[:, None], 0.0).log_softmax(-1)
    teacher_TV = teacher_logits_TV.detach().masked_fill(~train_mask[:, None], 0.0).log_softmax(-1)
    return summed_loss(
        -_divergence(policy_TV, teacher_TV, direction),
        train_mask,
        torch.zeros_like(train_mask),
        token_weights,
    )


def top_k_loss(
    policy_logits_TV: Float[Tensor, "T V"],
    teacher_logprobs_TK: Float[Tensor, "T K"],
    teacher_ids_TK: Int[Tensor, "T K"],
    train_mask: Bool[Tensor, " T"],
    *,
    direction: Direction = "reverse",
    token_weights: Float[Tensor, " T"] | None = None,
) -> TokenLoss:
    """Return ``sum_t w_t KL(pi || pi_T)`` over the teacher's K likeliest tokens and a bucket for all others.

    Merging tokens can only lower a divergence, so this is a lower bound of
    :func:`full_vocabulary_loss`, and equal to it where K leaves one token out. A server that reports its top
    log-probabilities is enough of a teacher.

    Source: the tail bucket makes two distributions of what would otherwise be parts of them; LongArc's, after the
    top-k of GLM-5.2's distillation, whose form is not published.

    Args:
        policy_logits_TV: of the student, divided by the temperature; carries gradient.
        teacher_logprobs_TK: log pi_T [nats] of the teacher's likeliest tokens, over its whole vocabulary; constant.
        teacher_ids_TK: their ids, all different.
        train_mask: True on trained tokens; rows of others may be anything, their ids too as long as they exist.
        direction: which of the two distributions is averaged over.
        token_weights: 1 for a token mean (the default).

    Raises:
        ConfigError: K is not below the vocabulary, so that there is no bucket: use :func:`full_vocabulary_loss`.
    """
    num_kept, vocab_size = teacher_ids_TK.shape[1], policy_logits_TV.shape[1]
    if not 0 < num_kept < vocab_size:
        raise ConfigError(
            f"{num_kept} teacher tokens of a vocabulary of {vocab_size} leave no bucket for others, or nothing "
            f"beside it; give 1 to {vocab_size - 1}, or use full_vocabulary_loss"
        )
    is_row = train_mask[:, None]
    policy_TV = policy_logits_TV.masked_fill(~is_row, 0.0).log_softmax(-1)
    is_listed_TV = torch.zeros_like(policy_TV, dtype=torch.bool).scatter(1, teacher_ids_TK, True)
    tail_T1 = policy_TV.masked_fill(is_listed_TV, -torch.inf).logsumexp(-1, keepdim=True)
    policy = torch.cat([policy_TV.gather(1, teacher_ids_TK), tail_T1], dim=1)

    uniform = -torch.log(torch.tensor(float(vocab_size)))
    listed = teacher_logprobs_TK.detach().masked_fill(~is_row, uniform.item())
    # 1 - sum p in log space, and not below what rounding leaves of it: the sum may even exceed 1.
    rest = (-torch.expm1(listed.logsumexp(-1, keepdim=True))).clamp_min(
        torch.finfo(listed.dtype).eps
    )
    teacher = torch.cat([listed, rest.log()], dim=1)
    return summed_loss(
        -_divergence(policy, teacher, direction),
        train_mask,
        torch.zeros_like(train_mask),
        token_weights,
    )


def _divergence(
    policy: Float[Tensor, "T N"], teacher: Float[Tensor, "T N"], direction: Direction
) -> Float[Tensor, " T"]:
    """Return KL [nats] of each row; a token of probability 0 in the first distribution counts nothing."""
    first, second = (policy, teacher) if direction == "reverse" else (teacher, policy)
    is_possible = first > -torch.inf
    gap = first.masked_fill(~is_possible, 0.0) - second.masked_fill(~is_possible, 0.0)
    return (first.exp() * gap).sum(-1)
