"""On-policy distillation: the teacher's opinion of each sampled token is its advantage."""

from jaxtyping import Float
from torch import Tensor


def distillation_advantages(
    policy_logprobs: Float[Tensor, " tokens"], teacher_logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """Return ``sg[log pi_teacher - log pi_policy]``; neither centred nor scaled nor discounted.

    Its policy gradient is that of ``-KL(pi || pi_teacher)``. Both are log-probabilities [nats] at the
    temperature of the rollout.

    Source: GLM-5 (arXiv:2602.15763) eq. 2.
    """
    return (teacher_logprobs - policy_logprobs).detach()
