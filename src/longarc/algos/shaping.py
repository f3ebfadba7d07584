"""What is added to a grader's reward. Plain Python, so that the control plane can use it without torch."""

from longarc.errors import ConfigError


def overlong_penalty(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Return ``0 if l <= L_max - L_cache, (L_max - L_cache - l) / L_cache if l <= L_max, else -1``.

    A length that was cut off is punished softly before it is reached, so that the policy can feel the limit.

    Source: soft overlong punishment, DAPO (arXiv:2503.14476), eq. 13, with 20,480 and 4,096 tokens.

    Args:
        num_tokens: l, sampled tokens of the rollout [tokens].
        max_tokens: L_max [tokens].
        cache_tokens: L_cache, over which the punishment grows from 0 to 1 [tokens].

    Raises:
        ConfigError: the interval is empty or longer than the limit.
    """
    check_overlong(max_tokens=max_tokens, cache_tokens=cache_tokens)
    soft_limit = max_tokens - cache_tokens
    if num_tokens <= soft_limit:
        return 0.0
    if num_tokens <= max_tokens:
        return (soft_limit - num_tokens) / cache_tokens
    return -1.0


def check_overlong(*, max_tokens: int, cache_tokens: int) -> None:
    """Refuse an interval that is empty or longer than the limit.

    Raises:
        ConfigError: names both numbers.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ConfigError(
            f"cache_tokens={cache_tokens} of max_tokens={max_tokens}: the punishment grows over the last cache_tokens "
            f"before the limit; choose 1 to {max_tokens}"
        )
