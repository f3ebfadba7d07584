"""What the factors and bounds of an objective may be: a senseless one is refused by name.

The functions of this package call these, so a recipe's settings, a user's own code and a notebook get the same answer.
NaN passes no comparison and is refused everywhere.
"""

from longarc.errors import ConfigError


def check_frac(name: str, value: float) -> None:
    """Refuse a discount, lambda or share outside [0, 1].

    Raises:
        ConfigError: names it.
    """
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}={value} is out of range; choose a number from 0 to 1")


def check_positive(name: str, value: float) -> None:
    """Refuse a scale that is not above 0.

    Raises:
        ConfigError: names it.
    """
    if not value > 0.0:
        raise ConfigError(f"{name}={value} is out of range; choose a number above 0")


def check_not_negative(name: str, value: float) -> None:
    """Refuse a coefficient below 0.

    Raises:
        ConfigError: names it.
    """
    if not value >= 0.0:
        raise ConfigError(f"{name}={value} is out of range; choose 0 or a number above it")


def check_band(low: float, high: float, *, is_closed: bool) -> None:
    """Refuse a band of ratios without 1 inside: it would reject what the policy of today sampled.

    Args:
        low: lower bound of the ratio.
        high: upper bound of the ratio.
        is_closed: whether the bounds belong to the band; then both may be 1.

    Raises:
        ConfigError: names both bounds.
    """
    holds_one = low <= 1.0 <= high if is_closed else low < 1.0 < high
    if not (low >= 0.0 and holds_one):
        sign = "<=" if is_closed else "<"
        raise ConfigError(
            f"low={low}, high={high}: the band excludes the ratio 1 of an on-policy token, or goes below 0; choose "
            f"0 <= low {sign} 1 {sign} high. They are bounds and not epsilons: 0.2 and 1.28, not 0.8 and 0.28"
        )


def check_clip(eps_low: float, eps_high: float, dual_clip: float | None = None) -> None:
    """Refuse clip ranges that exclude the ratio 1, and a dual clip that would act inside them.

    Raises:
        ConfigError: names what is wrong.
    """
    if not (eps_low >= 0.0 and eps_high >= 0.0):
        raise ConfigError(
            f"eps_low={eps_low}, eps_high={eps_high}: the ratio is clipped to 1 - eps_low ... 1 + eps_high, which "
            f"would exclude 1; choose 0 or more for both, 0.2 and 0.28 for instance"
        )
    if dual_clip is not None and not dual_clip > 1.0 + eps_high:
        raise ConfigError(
            f"dual_clip={dual_clip} is not above 1 + eps_high = {1.0 + eps_high}; it bounds what the clip leaves "
            f"open, ratios far above 1: choose 3 for instance, or leave it out"
        )
