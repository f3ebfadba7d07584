"""The one definition of sampling: from logits to a token and the log-probability it was drawn with.

Shape letters: B requests, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.models.kernels.native import native_for
from longarc.models.kernels.vocabulary import sample_rows
from longarc.records.sampling import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: Sequence[int], positions: "Sequence[int] | npt.NDArray[np.int64]"
) -> "npt.NDArray[np.float64]":
    """Return one number in [0, 1) per (seed, position): a hash, so that no draw depends on another request.

    Positions may have leading axes that the seeds have not; the result has the shape of the positions.

    The mixing function is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
    """
    with np.errstate(over="ignore"):
        mixed = np.asarray(seeds, dtype=np.uint64)
        for word in (np.uint64(0), np.asarray(positions, dtype=np.uint64)):
            mixed = mixed + (word + np.uint64(1)) * _GOLDEN
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
            mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampling_logprobs(
    logits_BV: Float[Tensor, "B V"], samplings: Sequence[Sampling]
) -> Float[Tensor, "B V"]:
    """Return the log-probabilities [nats] of the distributions that are sampled from.

    Temperature first, then top-k, then top-p (both keep ties at the boundary), then renormalised.
    A temperature of zero leaves the plain distribution here; `sample` then takes its maximum.
    """
    temperatures = torch.tensor(
        [s.temperature if s.temperature > 0 else 1.0 for s in samplings], dtype=torch.float32
    )
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperatures[:, None], dim=-1)
    for row, sampling in enumerate(samplings):
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            logprobs_BV[row] = _truncated(logprobs_BV[row], sampling)
    return logprobs_BV


def _truncated(logprobs: Float[Tensor, " V"], sampling: Sampling) -> Float[Tensor, " V"]:
    kept = logprobs
    if 0 < sampling.top_k < len(kept):
        threshold = kept.topk(sampling.top_k).values[-1]
        kept = kept.masked_fill(kept < threshold, float("-inf"))
    if sampling.top_p < 1.0:
        ordered = torch.softmax(kept, dim=-1).sort(descending=True).values
        num_kept = int((ordered.cumsum(0) - ordered < sampling.top_p).sum())
        threshold_probability = ordered[max(num_kept, 1) - 1]
        kept = kept.masked_fill(torch.softmax(kept, dim=-1) < threshold_probability, float("-inf"))
    return torch.log_softmax(kept, dim=-1)


def sample(
    logits_BV: Float[Tensor, "B V"],
    samplings: Sequence[Sampling],
    *,
    seeds: Sequence[int],
    positions: Sequence[int],
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Draw one token per request by inverting its cumulative distribution.

    A token of probability zero is never drawn. Rows whose logits are not finite are reported and
    their draw means nothing.

    Args:
        logits_BV: raw logits of the next token.
        samplings: how each request is sampled.
        seeds: seed of each request.
        positions: how many tokens each request has sampled so far.

    Returns:
        Tokens, their log-probabilities [nats] under the distribution drawn from, and whether the row was finite.
    """
    if is_plain(samplings) and native_for(logits_BV):
        return _sample_natively(logits_BV, samplings, seeds, positions)
    is_finite_B = torch.isfinite(logits_BV).all(dim=-1)
    if not bool(is_finite_B.all()):
        logits_BV = torch.where(is_finite_B[:, None], logits_BV, 0.0)
    logprobs_BV = sampling_logprobs(logits_BV, samplings)
    cumulative_BV = logprobs_BV.exp().double().cumsum(dim=-1)
    draws_B1 = torch.from_numpy(uniforms(seeds, positions))[:, None] * cumulative_BV[:, -1:]
    tokens_B = torch.searchsorted(cumulative_BV, draws_B1, right=True)[:, 0]
    # Rounding can put a draw on the very end; the last token with any probability is the right one.
    last_B = torch.searchsorted(cumulative_BV, cumulative_BV[:, -1:].contiguous())[:, 0]
    tokens_B = torch.minimum(tokens_B, last_B)
    is_greedy = [s.temperature == 0 for s in samplings]
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    if any(is_greedy):
        greedy_B = torch.tensor(is_greedy)
        tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), tokens_B)
        chosen_B = chosen_B.masked_fill(greedy_B, 0.0)
    return tokens_B, chosen_B, is_finite_B


def is_plain(samplings: Sequence[Sampling]) -> bool:
    """Whether temperature is all there is to the distributions."""
    return all(s.top_k <= 0 and s.top_p >= 1.0 for s in samplings)


def _sample_natively(
    logits_BV: Tensor, samplings: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    temperatures = [s.temperature for s in samplings]
    # The kernel divides by the temperature in place.
    is_scaled = any(t not in (0.0, 1.0) for t in temperatures)
    return sample_rows(
        logits_BV.clone() if is_scaled else logits_BV.contiguous(),
        torch.tensor(temperatures, dtype=torch.float32),
        torch.from_numpy(uniforms(seeds, positions)),
    )
