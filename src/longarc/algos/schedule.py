"""Learning-rate schedules: a step index in, a rate out."""

import math


def warmup_constant(step: int, *, peak: float, warmup_steps: int) -> float:
    """Return the rate of 0-based ``step``: linear up to ``peak`` in ``warmup_steps``, then constant.

    The first step already moves (``peak / warmup_steps``), and step ``warmup_steps - 1`` has the peak.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak


def warmup_cosine(
    step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int
) -> float:
    """Return the rate of 0-based ``step``: warm-up, then half a cosine down to ``final``.

    ``final`` is reached at the last step, ``total_steps - 1``, and kept after it.
    """
    if step < warmup_steps:
        return warmup_constant(step, peak=peak, warmup_steps=warmup_steps)
    progress = _decay_progress(step, warmup_steps=warmup_steps, total_steps=total_steps)
    return final + 0.5 * (peak - final) * (1.0 + math.cos(math.pi * progress))


def warmup_linear(
    step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int
) -> float:
    """Return the rate of 0-based ``step``: warm-up, then a straight line down to ``final``.

    ``final`` is reached at the last step, ``total_steps - 1``, and kept after it.
    """
    if step < warmup_steps:
        return warmup_constant(step, peak=peak, warmup_steps=warmup_steps)
    progress = _decay_progress(step, warmup_steps=warmup_steps, total_steps=total_steps)
    return peak + (final - peak) * progress


def _decay_progress(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return how much of the decay is done at ``step``, from just above 0 to 1."""
    num_decay_steps = max(total_steps - warmup_steps, 1)
    return min((step - warmup_steps + 1) / num_decay_steps, 1.0)
