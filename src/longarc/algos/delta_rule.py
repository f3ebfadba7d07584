"""The gated delta rule: attention whose memory is one matrix, read and corrected token by token.

A token first forgets a part of everything, then replaces what the memory holds under its key:

    M_t = a_t (I - b_t k_t k_t^T) M_{t-1} + b_t k_t v_t^T          o_t = M_t^T q_t

Two forms of one function: the recurrence, a token at a time (decode), and chunks of C tokens (training).
With G_t = a_1 ... a_t from the start of a chunk and M_0 the memory before it,

    M_t = G_t M_0 + sum_{i<=t} (G_t / G_i) k_i u_i^T
    (I + A) U = diag(b) V - diag(b G) K M_0         A_ti = b_t (G_t / G_i) k_t . k_i  for i < t

so that all of a chunk but the products with M_0 is computed for all chunks at once, and only those go
from chunk to chunk.

Source: Gated DeltaNet, Yang et al., arXiv:2412.06464, section 3; the chunked form is that of DeltaNet, Yang et al.,
arXiv:2406.06484. GLM-5, arXiv:2602.15763, section 2.1.2 compares it with attention. Shape letters: X anything
(chunks, heads), C tokens of a chunk, T tokens, k key width, v value width.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def delta_rule_step(
    query_Xk: Float[Tensor, "*X k"],
    key_Xk: Float[Tensor, "*X k"],
    value_Xv: Float[Tensor, "*X v"],
    log_decay_X: Float[Tensor, "*X"],
    beta_X: Float[Tensor, "*X"],
    memory_Xkv: Float[Tensor, "*X k v"],
) -> tuple[Float[Tensor, "*X v"], Float[Tensor, "*X k v"]]:
    """Take one token; return what it reads, and the memory after it.

    Args:
        query_Xk: what is looked up.
        key_Xk: where the token writes; of length 1, or ``beta`` times its squared length below 2.
        value_Xv: what it writes.
        log_decay_X: logarithm of the share of the memory that is kept, at most 0.
        beta_X: share of the old value under the key that is replaced.
        memory_Xkv: before the token.
    """
    kept_Xkv = memory_Xkv * log_decay_X.exp()[..., None, None]
    found_Xv = (key_Xk[..., None, :] @ kept_Xkv)[..., 0, :]
    update_Xv = (value_Xv - found_Xv) * beta_X[..., None]
    memory_Xkv = kept_Xkv + key_Xk[..., None] * update_Xv[..., None, :]
    return (query_Xk[..., None, :] @ memory_Xkv)[..., 0, :], memory_Xkv


@dataclass(frozen=True, slots=True)
class ChunkParts:
    """All of a chunk that does not depend on the memory before it."""

    update: Float[Tensor, "*X C v"]
    """What the tokens would write into an empty memory."""
    correction: Float[Tensor, "*X C k"]
    """How the memory before the chunk is found by its tokens, to be taken from what they write."""
    reader: Float[Tensor, "*X C k"]
    """Queries to the memory before the chunk."""
    within: Float[Tensor, "*X C C"]
    """How much each token reads of what each one writes."""
    writer: Float[Tensor, "*X C k"]
    """Keys, with the decay until the end of the chunk."""
    decay: Float[Tensor, "*X"]
    """Share of the memory before the chunk that is left after it."""

    def rows(self, chosen: slice) -> "ChunkParts":
        """Return a range of the chunks, the first axis."""
        return ChunkParts(
            self.update[chosen],
            self.correction[chosen],
            self.reader[chosen],
            self.within[chosen],
            self.writer[chosen],
            self.decay[chosen],
        )


def chunk_parts(
    query_XCk: Float[Tensor, "*X C k"],
    key_XCk: Float[Tensor, "*X C k"],
    value_XCv: Float[Tensor, "*X C v"],
    log_decay_XC: Float[Tensor, "*X C"],
    beta_XC: Float[Tensor, "*X C"],
) -> ChunkParts:
    """Compute what is inside each chunk; a padded token is all zeros and changes nothing."""
    total_XC = log_decay_XC.cumsum(dim=-1)
    # Masked before the exponential: above the diagonal it could overflow, and inf * 0 is NaN in backward.
    future_CC = torch.ones(
        key_XCk.shape[-2], key_XCk.shape[-2], dtype=torch.bool, device=key_XCk.device
    ).triu(1)
    ratio_XCC = total_XC[..., :, None] - total_XC[..., None, :]
    ratio_XCC = ratio_XCC.masked_fill(future_CC, float("-inf")).exp()
    weighted_XCk = key_XCk * beta_XC[..., None]
    # The solver reads below the diagonal alone and takes the diagonal for ones.
    system_XCC = weighted_XCk @ key_XCk.mT * ratio_XCC
    since_start_XC1 = total_XC.exp()[..., None]
    right_XCw = torch.cat([value_XCv * beta_XC[..., None], weighted_XCk * since_start_XC1], dim=-1)
    solved_XCw = torch.linalg.solve_triangular(
        system_XCC, right_XCw, upper=False, unitriangular=True
    )
    update_XCv, correction_XCk = solved_XCw.split([value_XCv.shape[-1], key_XCk.shape[-1]], dim=-1)
    until_end_XC1 = (total_XC[..., -1:] - total_XC).exp()[..., None]
    return ChunkParts(
        update_XCv,
        correction_XCk,
        query_XCk * since_start_XC1,
        query_XCk @ key_XCk.mT * ratio_XCC,
        key_XCk * until_end_XC1,
        total_XC[..., -1].exp(),
    )


def chunk_step(
    parts: ChunkParts, memory_Xkv: Float[Tensor, "*X k v"]
) -> tuple[Float[Tensor, "*X C v"], Float[Tensor, "*X k v"]]:
    """Join chunks to the memory before them; return what their tokens read, and the memory after them."""
    written_XCv = parts.update - parts.correction @ memory_Xkv
    output_XCv = parts.reader @ memory_Xkv + parts.within @ written_XCv
    kept_Xkv = memory_Xkv * parts.decay[..., None, None]
    return output_XCv, kept_Xkv + parts.writer.mT @ written_XCv
