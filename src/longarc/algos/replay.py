"""What is worth learning again. Plain Python, so that the control plane can use it without torch."""

import math
from collections.abc import Sequence

from longarc.errors import ConfigError, ContractError


def perplexity(logprobs: Sequence[float]) -> float:
    """Return ``exp(-mean log pi)``, the perplexity of an action under a policy.

    Source: the usual definition, as in WebRL (arXiv:2411.02337).

    Args:
        logprobs: log pi [nats] of each of its tokens under the policy of today.

    Raises:
        ContractError: there is no token.
    """
    if not logprobs:
        raise ContractError("an action without tokens has no perplexity; leave it out")
    return math.exp(min(-math.fsum(logprobs) / len(logprobs), 700.0))


def is_worth_replaying(
    logprobs: Sequence[float],
    *,
    min_perplexity: float = 1 / 0.95,
    max_perplexity: float = 1 / 0.5,
) -> bool:
    """Say whether ``min <= perplexity <= max`` of a past action under the policy of today.

    Below, the policy is sure of it already, and would only become surer; above, it has become so unlikely that
    learning it would tear at the policy. Actions are replayed from successful trajectories alone.

    Source: actor-confidence filtering of WebRL (arXiv:2411.02337): 1/0.95 to 1/0.5.

    Args:
        logprobs: see :func:`perplexity`.
        min_perplexity: at least 1.
        max_perplexity: above the other.

    Raises:
        ConfigError: the window is empty or below 1.
        ContractError: there is no token.
    """
    if not 1.0 <= min_perplexity < max_perplexity:
        raise ConfigError(
            f"min_perplexity={min_perplexity}, max_perplexity={max_perplexity} is no window of perplexities; choose "
            f"1 <= min_perplexity < max_perplexity"
        )
    return min_perplexity <= perplexity(logprobs) <= max_perplexity
