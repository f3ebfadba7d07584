"""Learning from pairs: which of two answers is better, without a reward model between.

A pair is a chosen and a rejected answer to one prompt. ``log pi(y)`` of an answer is the sum over its trained tokens
(:func:`longarc.algos.sequences.sequence_sums`).
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from longarc.algos.checks import check_not_negative, check_positive
from longarc.algos.token_loss import TokenLoss


def dpo_loss(
    chosen_logprobs: Float[Tensor, " pairs"],
    rejected_logprobs: Float[Tensor, " pairs"],
    chosen_reference_logprobs: Float[Tensor, " pairs"],
    rejected_reference_logprobs: Float[Tensor, " pairs"],
    *,
    beta: float,
) -> TokenLoss:
    """Return ``-sum log sigmoid(beta (log pi/pi_ref(chosen) - log pi/pi_ref(rejected)))``; the normaliser is pairs.

    ``num_rejected`` counts pairs that the policy ranks the wrong way round, relative to the reference.

    Source: DPO, Rafailov et al. (arXiv:2305.18290), eq. 7.

    Args:
        chosen_logprobs: log pi(y) [nats] of the better answers, summed over tokens; carries gradient.
        rejected_logprobs: the same of the worse answers; carries gradient.
        chosen_reference_logprobs: log pi_ref(y) [nats] of the better answers; constant.
        rejected_reference_logprobs: the same of the worse answers; constant.
        beta: how much the policy is held to the reference; 0.15 in AutoWebGLM.

    Raises:
        ConfigError: beta is not above 0.
    """
    check_positive("beta", beta)
    margin = (chosen_logprobs - chosen_reference_logprobs.detach()) - (
        rejected_logprobs - rejected_reference_logprobs.detach()
    )
    return TokenLoss(
        loss_sum=-logsigmoid(beta * margin).sum(),
        normaliser=margin.new_tensor(float(len(margin))),
        num_rejected=(margin.detach() < 0).sum().to(margin.dtype),
    )


def dpo_sft_loss(
    chosen_logprobs: Float[Tensor, " pairs"],
    rejected_logprobs: Float[Tensor, " pairs"],
    chosen_reference_logprobs: Float[Tensor, " pairs"],
    rejected_reference_logprobs: Float[Tensor, " pairs"],
    chosen_lengths: Float[Tensor, " pairs"],
    *,
    beta: float = 0.15,
    sft_weight: float = 0.8,
) -> TokenLoss:
    """Return ``DPO - c sum log pi(chosen) / |chosen|``; the normaliser is pairs.

    DPO alone may lower the probability of both answers as long as their distance grows; the second part holds the
    better one up.

    Source: AutoWebGLM (arXiv:2404.03648), beta 0.15 and c = 0.8 on 13 thousand pairs; the mean over the answer's
    tokens is LongArc's reading of its SFT loss.

    Args:
        chosen_logprobs: see :func:`dpo_loss`.
        rejected_logprobs: see :func:`dpo_loss`.
        chosen_reference_logprobs: see :func:`dpo_loss`.
        rejected_reference_logprobs: see :func:`dpo_loss`.
        chosen_lengths: trained tokens of each better answer [tokens].
        beta: see :func:`dpo_loss`.
        sft_weight: c, 0 or more.

    Raises:
        ConfigError: beta is not above 0, or the weight is below 0.
    """
    check_not_negative("sft_weight", sft_weight)
    dpo = dpo_loss(
        chosen_logprobs,
        rejected_logprobs,
        chosen_reference_logprobs,
        rejected_reference_logprobs,
        beta=beta,
    )
    sft = -(chosen_logprobs / chosen_lengths).sum()
    return TokenLoss(
        loss_sum=dpo.loss_sum + sft_weight * sft,
        normaliser=dpo.normaliser,
        num_rejected=dpo.num_rejected,
    )


def implicit_rewards(
    logprobs: Float[Tensor, " answers"],
    reference_logprobs: Float[Tensor, " answers"],
    *,
    beta: float,
) -> Float[Tensor, " answers"]:
    """Return ``beta log pi(y) / pi_ref(y)``, the reward of which a DPO-trained policy is the optimum; constant.

    Source: DPO, Rafailov et al. (arXiv:2305.18290), eq. 5, up to a term of the prompt.

    Raises:
        ConfigError: beta is not above 0.
    """
    check_positive("beta", beta)
    return beta * (logprobs - reference_logprobs).detach()
