"""On-policy distillation: the teacher's opinion of each sampled token is its advantage.

The losses over more than the sampled token are in :mod:`longarc.algos.distill_vocabulary`.
"""

from jaxtyping import Float, Int
from torch import Tensor

from longarc.algos.checks import check_not_negative


def distillation_advantages(
    policy_logprobs: Float[Tensor, " tokens"], teacher_logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """Return ``sg[log pi_teacher - log pi_policy]``; neither centred nor scaled nor discounted.

    Its policy gradient is that of ``-KL(pi || pi_teacher)``. Both are log-probabilities [nats] at the
    temperature of the rollout.

    Source: GLM-5 (arXiv:2602.15763) eq. 2.
    """
    return (teacher_logprobs - policy_logprobs).detach()


def guided_advantages(
    advantages: Float[Tensor, " tokens"],
    policy_logprobs: Float[Tensor, " tokens"],
    teacher_logprobs: Float[Tensor, " tokens"],
    *,
    coeff: float,
) -> Float[Tensor, " tokens"]:
    """Return ``A - c sg[log pi_policy - log pi_teacher]``: a reward and a teacher at once.

    With A = 0 and c = 1 this is :func:`distillation_advantages`.

    Source: slime's on-policy distillation, ``--opd-kl-coef``, 1 by default.

    Args:
        advantages: A of each token, from rewards; constant.
        policy_logprobs: log pi [nats] of the student at the temperature of the rollout.
        teacher_logprobs: log pi [nats] of the teacher at the same temperature.
        coeff: c, 0 or more.

    Raises:
        ConfigError: the coefficient is below 0.
    """
    check_not_negative("coeff", coeff)
    return advantages.detach() + coeff * distillation_advantages(policy_logprobs, teacher_logprobs)


def routed_logprobs(
    teacher_logprobs: Float[Tensor, "teachers tokens"], teacher_of_token: Int[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """Return ``log pi_{k(t)}(a_t)``: for each token the score of the teacher of its task.

    The other teachers' scores are not read; they may be anything, NaN where a teacher did not score at all.

    Source: GLM-5 (arXiv:2602.15763), section 3.5 (the checkpoints of earlier stages teach their own prompt sets);
    GLM-5.2's parallel distillation from more than ten experts.

    Args:
        teacher_logprobs: log pi [nats] of each teacher for each token.
        teacher_of_token: k, the row of the teacher that teaches the token's task.
    """
    return teacher_logprobs.gather(0, teacher_of_token[None])[0]
