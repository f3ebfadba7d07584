"""The value every policy loss returns: a sum and what to divide it by."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Un-normalised loss of one micro-batch; the trainer divides once by the global normaliser."""

    loss_sum: Float[Tensor, ""]
    """Weighted sum over trained tokens; carries the gradient."""
    normaliser: Float[Tensor, ""]
    """Sum of the weights of all trained tokens, rejected ones included."""
    num_rejected: Float[Tensor, ""]
    """Trained tokens outside the trust region [tokens]. Their gradient is exactly zero, or bounded in a loss that clamps."""
