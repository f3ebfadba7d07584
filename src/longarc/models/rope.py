"""Frequencies of rotary embeddings, plain and scaled.

::

    plain   theta_i = base^(-2i/d)
    linear  theta_i / s
    llama3  a theta_i + (1 - a) theta_i / s    a rises with the turns that pair i makes in the original context
    yarn    the same mix; a falls with i, along a ramp between two dimensions

Kept apart from the rotation, so that every formula can be read and tested on its own. fp32, in the order of
operations of transformers, so that the same checkpoint turns by the same angles.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from longarc.config.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope


def inverse_frequencies(
    *, width: int, base: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Float[Tensor, " half"]:
    """Return the angle by which each pair of a head turns from one position to the next [radians]."""
    exponent_h = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    period_h = base**exponent_h
    match scaling:
        case None:
            return 1.0 / period_h
        case LinearRope():
            return 1.0 / period_h / scaling.factor
        case Llama3Rope():
            return _llama3(1.0 / period_h, scaling)
        case YarnRope():
            kept_h = 1 - _yarn_ramp(scaling, width=width, base=base).to(period_h.device)
            slowed_h = 1.0 / (scaling.factor * period_h)
            return slowed_h * (1 - kept_h) + 1.0 / period_h * kept_h


def amplitude(scaling: RopeScaling | None) -> float:
    """Return the factor on everything that is rotated."""
    return scaling.amplitude if isinstance(scaling, YarnRope) else 1.0


def latent_softmax_scale(width: int, scaling: RopeScaling | None) -> float:
    """Return the factor on the products of latent attention, whose heads are ``width`` wide.

    Source: DeepSeek-V2 (arXiv:2405.04434), which scales by the square of YaRN's mscale_all_dim.
    """
    scale: float = float(width) ** -0.5
    return scale * scaling.latent_sharpening if isinstance(scaling, YarnRope) else scale


def _llama3(plain_h: Tensor, scaling: Llama3Rope) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    wavelength_h = 2 * math.pi / plain_h
    kept_h = (context / wavelength_h - low) / (high - low)
    mixed_h = (1 - kept_h) * plain_h / scaling.factor + kept_h * plain_h
    is_fast_h, is_slow_h = wavelength_h < context / high, wavelength_h > context / low
    return torch.where(
        is_fast_h, plain_h, torch.where(is_slow_h, plain_h / scaling.factor, mixed_h)
    )


def _yarn_ramp(scaling: YarnRope, *, width: int, base: float) -> Tensor:
    """Return for each pair 0 where it is kept and 1 where it is divided by the whole factor, [width / 2]."""

    def dimension(turns: float) -> float:
        """Return the dimension, as a real number, that turns so many times in the original context."""
        context = scaling.original_max_position_embeddings
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # no division by zero; the value is that of the reference
    pair_h = torch.arange(width // 2, dtype=torch.float32)
    return ((pair_h - first) / (last - first)).clamp(0, 1)
