"""Scaled rotary embeddings: how a checkpoint stretches its positions beyond the context it was trained on.

Names are those of ``rope_parameters`` in a Hugging Face ``config.json``.
"""

import math
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from longarc.config.settings import Settings


class LinearRope(Settings):
    """All positions divided by one factor; Chen et al., arXiv:2306.15595."""

    rope_type: Literal["linear"] = "linear"
    """Which scaling this is."""
    factor: float = Field(ge=1)
    """What positions are divided by."""


class Llama3Rope(Settings):
    """Slow rotations divided by a factor, fast ones kept, a ramp between them; Llama 3.1, config.json."""

    rope_type: Literal["llama3"] = "llama3"
    """Which scaling this is."""
    factor: float = Field(ge=1)
    """What slow rotations are divided by."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Rotations that turn fewer times than this in the original context are divided by the whole factor."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Rotations that turn more often than this in the original context are kept."""
    original_max_position_embeddings: int = Field(ge=1)
    """Context that the model was trained on first [tokens]."""

    @model_validator(mode="after")
    def _ramp_rises(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor="
                f"{self.low_freq_factor}: the ramp goes from the second to the first"
            )
        return self


class YarnRope(Settings):
    """YaRN: slow rotations divided by a factor, fast ones kept, attention sharpened; arXiv:2309.00071."""

    rope_type: Literal["yarn"] = "yarn"
    """Which scaling this is."""
    factor: float = Field(ge=1)
    """What slow rotations are divided by."""
    original_max_position_embeddings: int = Field(ge=1)
    """Context that the model was trained on first [tokens]."""
    attention_factor: float | None = Field(None, gt=0)
    """Factor on rotated queries and keys; None computes it from factor, mscale and mscale_all_dim."""
    beta_fast: float = Field(32.0, gt=0)
    """Rotations that turn more often than this in the original context are kept."""
    beta_slow: float = Field(1.0, gt=0)
    """Rotations that turn fewer times than this in the original context are divided by the whole factor."""
    mscale: float | None = Field(None, ge=0)
    """Weight of the logarithm of the factor in attention_factor; read where mscale_all_dim is given too."""
    mscale_all_dim: float | None = Field(None, ge=0)
    """The same for all dimensions: divides attention_factor and, in latent attention, sharpens the softmax."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole dimensions."""

    @property
    def amplitude(self) -> float:
        """Factor on rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def latent_sharpening(self) -> float:
        """Factor on the softmax scale of latent attention, whose unrotated part the amplitude does not reach."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


RopeScaling: TypeAlias = Annotated[
    LinearRope | Llama3Rope | YarnRope, Field(discriminator="rope_type")
]
"""Any scaling that LongArc computes exactly; a model without one has ordinary rotary embeddings."""
