"""What made GLM-130B trainable in half precision: DeepNorm, GeGLU, and a smaller gradient at the embedding.

Source: GLM-130B, arXiv:2210.02414, section 2.1 (DeepNorm, GeGLU) and 3 (embedding gradient shrink).
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longarc.errors import ContractError


def residual_scale(num_layers: int) -> float:
    """Return ``alpha = (2N)^(1/2)``, the weight of the residual stream in a stack of N layers.

    Raises:
        ContractError: there is no layer.
    """
    if num_layers < 1:
        raise ContractError(f"num_layers = {num_layers}; a stack has at least 1 layer")
    return math.sqrt(2 * num_layers)


class DeepNorm(nn.Module):
    """``LayerNorm(alpha * x + f(x))``: post-norm in which a layer's part shrinks with the depth of the stack.

    GLM-130B's exponents, 1/2 and -1/2, are larger than those DeepNet derives for a decoder alone
    (alpha = (2N)^(1/4)): its residual stream weighs more.
    """

    def __init__(self, hidden_size: int, *, num_layers: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.alpha = residual_scale(num_layers)
        self.norm = nn.LayerNorm(hidden_size, eps=eps)

    def forward(
        self,
        hidden: Float[Tensor, "*rows hidden"],
        change: Float[Tensor, "*rows hidden"],
    ) -> Float[Tensor, "*rows hidden"]:
        """Add to the residual stream what a sublayer computed from it, and normalise."""
        normed: Tensor = self.norm(self.alpha * hidden + change)
        return normed


@torch.no_grad()
def init_deepnorm(
    scaled: Iterable[nn.Linear],
    unscaled: Iterable[nn.Linear],
    *,
    num_layers: int,
    generator: torch.Generator,
) -> None:
    """Draw the weights of a DeepNorm stack: Xavier normal, times ``(2N)^(-1/2)`` where it matters; no bias.

    Args:
        scaled: feed-forwards, and value and output projections of attention: what a layer adds to the
            residual stream grows with them.
        unscaled: query and key projections, which only decide where to look.
        num_layers: N, the layers of the whole stack.
        generator: draws the weights.

    Raises:
        ContractError: there is no layer.
    """
    gain = 1 / residual_scale(num_layers)
    for linears, scale in ((scaled, gain), (unscaled, 1.0)):
        for linear in linears:
            nn.init.xavier_normal_(linear.weight, gain=scale, generator=generator)
            if linear.bias is not None:
                linear.bias.zero_()


class GeGLU(nn.Module):
    """``(GELU(x W1) * (x W2)) W3``, with biases, as GLM-130B has them.

    Source: GLU variants, arXiv:2002.05202; GLM-130B keeps the parameter count of a plain feed-forward of
    width 4h with an inner width of 8h/3.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """Apply the feed-forward to each row."""
        hidden: Tensor = self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


def shrink_gradient(
    x: Float[Tensor, "*shape"], *, gradient_frac: float = 0.1
) -> Float[Tensor, "*shape"]:
    """Return ``x``, through which only ``gradient_frac`` of the gradient flows back.

    ``alpha x + (1 - alpha) sg(x)``, written so that the values are exactly those of ``x``: the two
    products would each be rounded. Used on the embedding, whose gradient norm in GLM-130B was the first
    to spike.

    Args:
        x: finite; the output of the embedding.
        gradient_frac: alpha, in [0, 1]; 0.1 in GLM-130B.

    Raises:
        ContractError: alpha is out of range.
    """
    if not 0 <= gradient_frac <= 1:
        raise ContractError(f"gradient_frac = {gradient_frac} is not a share; choose 0 to 1")
    fixed = x.detach()
    return fixed + gradient_frac * (x - fixed)
