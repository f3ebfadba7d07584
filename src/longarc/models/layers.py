"""The small parts every decoder is made of: norm, rotation, feed-forward, row padding.

Shape letters: T rows of tokens (padded), n heads, d width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from longarc.config.model import ComputeDtype
from longarc.config.rope import RopeScaling
from longarc.errors import ContractError
from longarc.models.kernels import rows as native_rows
from longarc.models.kernels.native import native_for
from longarc.models.rope import amplitude, inverse_frequencies
from longarc.models.rounding import product

ROW_MULTIPLE = 32
"""Row counts of all row-wise work are multiples of this.

A matrix product takes another kernel, with another order of summation, below a handful of rows, and
an elementwise function rounds its vector part and the remainder differently. With whole blocks of
rows a token's numbers do not depend on what else is in the batch (measured: fp32, MKL, 1 and 2 threads).
"""


def padded_rows(num_rows: int) -> int:
    """Return the row count that ``num_rows`` are padded to."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(rows: Shaped[Tensor, "rows ..."], num_rows: int) -> Shaped[Tensor, "padded ..."]:
    """Append rows of zeros until there are ``num_rows``."""
    missing = num_rows - rows.shape[0]
    if missing == 0:
        return rows
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


def check_ids(token_ids: Int[Tensor, " tokens"], vocab_size: int) -> None:
    """Refuse ids that index no row; the native kernels would read past the end.

    Raises:
        ContractError: there are no ids, or one is outside the vocabulary.
    """
    if len(token_ids) == 0:
        raise ContractError("there are no token ids; a pass needs at least one")
    low, high = (int(end) for end in token_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ContractError(
            f"token id {wrong} is outside the model's vocabulary 0..{vocab_size - 1}; use the tokenizer "
            f"that belongs to this model"
        )


class Linear(nn.Linear):
    """A product; where the native kernels run, a row's result depends on that row alone."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        compute_dtype: ComputeDtype = "float32",
    ) -> None:
        super().__init__(in_features, out_features, bias=has_bias)
        self._compute_dtype = compute_dtype

    def forward(self, x: Float[Tensor, "T inputs"]) -> Float[Tensor, "T outputs"]:
        """Return ``x weight^T``, plus the bias where there is one."""
        if native_for(x, self.weight):
            # The bias is added to the finished product, as in decoding: the same sums, the same bits.
            summed = native_rows.linear(x, self.weight, compute_dtype=self._compute_dtype)
        elif self._compute_dtype == "float32":
            return F.linear(x, self.weight, self.bias)
        else:
            summed = product(x, self.weight, self._compute_dtype)
        return summed if self.bias is None else summed + self.bias


class RMSNorm(nn.Module):
    """``w * x / sqrt(mean(x^2) + eps)``, statistics and product in fp32 or better."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Normalise each row."""
        if x.dim() == 2 and native_for(x, self.weight):
            return native_rows.rms_norm(x, self.weight, self.eps)
        dtype = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(dtype), (x.shape[-1],), self.weight.to(dtype), self.eps)
        return normed.to(x.dtype)


class Rotation:
    """Rotary position embedding of one forward pass, in fp32 or better.

    ``theta_i = base^(-2i/d)`` unless scaled; pair i of position p turns by ``p * theta_i``. GLM-5 rotates
    neighbouring pairs (interleaved), Llama pairs (i, i + d/2). YaRN also lengthens what it turns.
    """

    def __init__(
        self,
        positions: Int[Tensor, " T"],
        *,
        width: int,
        base: float,
        interleaved: bool,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> None:
        self._interleaved = interleaved
        frequency = inverse_frequencies(
            width=width, base=base, scaling=scaling, device=positions.device
        )
        angle = (positions[:, None].to(torch.float32) * frequency).double()
        # In fp64 and rounded once, so that the numbers do not depend on how a table is cut into vectors.
        length = amplitude(scaling)
        cos, sin = (length * angle.cos()).float(), (length * angle.sin()).float()
        self.angles = (cos, sin)
        """Cosine and sine of each pair, [T, width / 2] each, times the amplitude of the scaling."""
        dtype = torch.promote_types(dtype, torch.float32)
        if interleaved:
            self._cos = torch.stack([cos, cos], dim=-1).flatten(1)[:, None].to(dtype)
            self._sin = torch.stack([-sin, sin], dim=-1).flatten(1)[:, None].to(dtype)
        else:
            self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(dtype)
            self._sin = torch.cat([-sin, sin], dim=-1)[:, None].to(dtype)

    def apply(self, x_Tnd: Float[Tensor, "T n d"]) -> Float[Tensor, "T n d"]:
        """Rotate every head of every row."""
        if native_for(x_Tnd, *self.angles):
            return native_rows.rotate(x_Tnd, *self.angles, interleaved=self._interleaved)
        if self._interleaved:
            partner_Tnd = x_Tnd.view(*x_Tnd.shape[:-1], -1, 2).flip(-1).flatten(-2)
        else:
            partner_Tnd = x_Tnd.roll(x_Tnd.shape[-1] // 2, dims=-1)
        # Two products and a sum, each rounded on its own: a fused multiply-add may round differently
        # in the vector part and in the remainder.
        return (x_Tnd * self._cos + partner_Tnd * self._sin).to(x_Tnd.dtype)


class SwiGLU(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, compute_dtype: ComputeDtype = "float32"
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, compute_dtype=compute_dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, compute_dtype=compute_dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, compute_dtype=compute_dtype)
        self._compute_dtype = compute_dtype

    def forward(self, x: Float[Tensor, "T hidden"]) -> Float[Tensor, "T hidden"]:
        """Apply the feed-forward to each row."""
        gate, up, down = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        if native_for(x, gate, up, down):
            return native_rows.feed_forward(x, gate, up, down, compute_dtype=self._compute_dtype)
        hidden: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden
