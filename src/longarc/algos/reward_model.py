"""Reward models: what they learn from, and how rankings and judgements become rewards."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from longarc.algos.checks import check_not_negative
from longarc.algos.token_loss import TokenLoss


def bradley_terry_loss(
    chosen_scores: Float[Tensor, " pairs"],
    rejected_scores: Float[Tensor, " pairs"],
    *,
    margin: float = 0.0,
) -> TokenLoss:
    """Return ``-sum log sigmoid(s_chosen - s_rejected - m)``; the normaliser is pairs.

    ``num_rejected`` counts pairs that are scored the wrong way round.

    Source: Bradley and Terry (1952); reward models of InstructGPT (arXiv:2203.02155), eq. 1; the margin is Llama 2's
    (arXiv:2307.09288).

    Args:
        chosen_scores: scores of the better answers; carries gradient.
        rejected_scores: scores of the worse answers; carries gradient.
        margin: m, 0 or more: by how much the better one should lead.

    Raises:
        ConfigError: the margin is below 0.
    """
    check_not_negative("margin", margin)
    lead = chosen_scores - rejected_scores
    return TokenLoss(
        loss_sum=-logsigmoid(lead - margin).sum(),
        normaliser=lead.new_tensor(float(len(lead))),
        num_rejected=(lead.detach() < 0).sum().to(lead.dtype),
    )


def ranking_loss(scores: Float[Tensor, " answers"], ranks: Int[Tensor, " answers"]) -> TokenLoss:
    """Return ``-sum_{i better than j} log sigmoid(s_i - s_j)`` over all pairs of one prompt; the normaliser is pairs.

    Ties are no pair. All pairs of a prompt belong into one loss and one step: spread over steps, each answer would
    be learned many times.

    Source: InstructGPT (arXiv:2203.02155), eq. 1, K answers for K (K - 1) / 2 pairs; pairwise ranking of GLM-Z1,
    whose loss is not published.

    Args:
        scores: of the answers to one prompt; carries gradient.
        ranks: place of each answer, 0 is best; equal numbers are ties.
    """
    better, worse = (ranks[:, None] < ranks[None, :]).nonzero(as_tuple=True)
    return bradley_terry_loss(scores[better], scores[worse])


def outcome_loss(
    logits: Float[Tensor, " trajectories"], outcomes: Float[Tensor, " trajectories"]
) -> TokenLoss:
    """Return ``-sum (y log p + (1 - y) log(1 - p))`` with ``p = sigmoid(logit)``; the normaliser is trajectories.

    ``num_rejected`` counts trajectories that are judged wrongly at p = 1/2.

    Source: the outcome-supervised reward model of WebRL (arXiv:2411.02337).

    Args:
        logits: of "the task was done"; for a language model that answers with a word, the logit of YES less that of
            NO. Carries gradient.
        outcomes: y, 1 where the task was done, 0 where not.
    """
    loss = binary_cross_entropy_with_logits(logits, outcomes, reduction="sum")
    is_wrong = (logits.detach() > 0) != (outcomes > 0.5)
    return TokenLoss(
        loss_sum=loss,
        normaliser=logits.new_tensor(float(len(logits))),
        num_rejected=is_wrong.sum().to(logits.dtype),
    )


def judged_rewards(
    yes_logprobs: Float[Tensor, " trajectories"], no_logprobs: Float[Tensor, " trajectories"]
) -> Float[Tensor, " trajectories"]:
    """Return ``1 if p(YES) > p(NO) else 0``: the word of a judge as a reward.

    Source: WebRL (arXiv:2411.02337).
    """
    return (yes_logprobs > no_logprobs).to(yes_logprobs.dtype)


def win_rates(
    preferences: Float[Tensor, "answers answers"], is_compared: Bool[Tensor, "answers answers"]
) -> Float[Tensor, " answers"]:
    """Return ``R_i = mean_j P(i beats j)`` over the answers it was compared with; 1/2 without any, in float64.

    Rewards of a group from a judge that only compares. They lie in [0, 1] and, where every pair was compared both
    ways, have the mean 1/2.

    Source: pairwise ranking of GLM-Z1, whose rule is not published; the mean is Borda's count.

    Args:
        preferences: probability that the answer of the row beats that of the column, 1 or 0 from a judge that says
            one name; not read where not compared.
        is_compared: which pairs were compared. The diagonal is ignored.
    """
    others = is_compared & ~torch.eye(len(is_compared), dtype=torch.bool, device=is_compared.device)
    wins = preferences.double().masked_fill(~others, 0.0).sum(1)
    counts = others.sum(1)
    return torch.where(counts > 0, wins / counts.clamp_min(1), 0.5)
