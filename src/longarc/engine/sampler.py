"""The one definition of sampling: from logits to a token and the log-probability it was drawn with.

Shape letters: B requests, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.truncation import kept_logprobs, kept_tokens
from longarc.models.kernels.native import native_for
from longarc.models.kernels.vocabulary import sample_rows
from longarc.records.sampling import Sampling
from longarc.tokens.grammar import AllowedIds

Allowed: TypeAlias = Sequence[AllowedIds | None]
"""Of each request, the ids that its constraint allows next; None for the whole vocabulary."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Stream(IntEnum):
    """What a number is drawn for; ``cpu/rounds.h`` has the same."""

    TOKEN = 0
    """The token that the main model draws."""
    DRAFT = 1
    """The draft at the same position."""
    ACCEPT = 2
    """Whether that draft stays."""


def uniforms(
    seeds: Sequence[int],
    positions: "Sequence[int] | npt.NDArray[np.int64]",
    stream: Stream = Stream.TOKEN,
) -> "npt.NDArray[np.float64]":
    """Return one number in [0, 1) per (seed, position): a hash, so that no draw depends on another request.

    Positions may have leading axes that the seeds have not; the result has the shape of the positions.

    The mixing function is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
    """
    with np.errstate(over="ignore"):
        mixed = np.asarray(seeds, dtype=np.uint64)
        for word in (np.uint64(stream), np.asarray(positions, dtype=np.uint64)):
            mixed = mixed + (word + np.uint64(1)) * _GOLDEN
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
            mixed = mixed ^ (mixed >> np.uint64(31))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampling_probability(
    logits_BV: Float[Tensor, "B V"], samplings: Sequence[Sampling], allowed: Allowed = ()
) -> Float[Tensor, "B V"]:
    """Return the distributions that are sampled from; 1 at the likeliest token where the temperature is 0.

    A row whose logits are not finite is all zeros. ``allowed`` is as in ``sampling_logprobs``.
    """
    is_finite_B1 = torch.isfinite(logits_BV).all(dim=-1, keepdim=True)
    probability_BV = sampling_logprobs(
        torch.where(is_finite_B1, logits_BV, 0.0), samplings, allowed
    ).exp()
    greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature == 0]
    if greedy:
        probability_BV[greedy] = 0.0
        probability_BV[greedy, _only(logits_BV, allowed)[greedy].argmax(dim=-1)] = 1.0
    return torch.where(is_finite_B1, probability_BV, 0.0)


def sampling_logprobs(
    logits_BV: Float[Tensor, "B V"], samplings: Sequence[Sampling], allowed: Allowed = ()
) -> Float[Tensor, "B V"]:
    """Return the log-probabilities [nats] of the distributions that are sampled from.

    What each field of `Sampling` does to them stands there. A temperature of zero leaves the plain distribution
    here; `sample` then takes its maximum.

    Args:
        logits_BV: finite.
        samplings: of each row.
        allowed: of each row, or of none.
    """
    scaled_BV = logits_BV.float() / _temperatures(samplings)[:, None]
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    scaled_BV = _only(scaled_BV, allowed)
    for rule, rows in _by_truncation(samplings, allowed).items():
        top_k, top_p, min_p = rule
        is_kept = kept_tokens(scaled_BV[rows], top_k=top_k, top_p=top_p, min_p=min_p)
        is_kept &= scaled_BV[rows] > -math.inf
        for row, kept in zip(rows, is_kept, strict=True):
            ids = kept.nonzero()[:, 0]
            among = kept_logprobs(
                scaled_BV[row, ids][None], torch.ones(1, len(ids), dtype=torch.bool)
            )
            logprobs_BV[row] = -math.inf
            logprobs_BV[row, ids] = among[0].to(logprobs_BV.dtype)
    return logprobs_BV


def _temperatures(samplings: Sequence[Sampling]) -> Float[Tensor, " B"]:
    return torch.tensor(
        [s.temperature if s.temperature > 0 else 1.0 for s in samplings], dtype=torch.float32
    )


def _only(values_BV: Tensor, allowed: Allowed) -> Tensor:
    """Return the values with -inf where a row's token is not allowed."""
    rows = [row for row, ids in enumerate(allowed) if ids is not None]
    if rows:
        values_BV = values_BV.clone()
        is_allowed = np.stack([ids.mask() for ids in allowed if ids is not None])
        values_BV[rows] = values_BV[rows].masked_fill(~torch.from_numpy(is_allowed), -math.inf)
    return values_BV


def _by_truncation(
    samplings: Sequence[Sampling], allowed: Allowed
) -> dict[tuple[int, float, float], list[int]]:
    """Return the rows of each rule; those that keep every token have none."""
    rows: dict[tuple[int, float, float], list[int]] = {}
    constrained = {row for row, ids in enumerate(allowed) if ids is not None}
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0 and (sampling.is_truncated or row in constrained):
            rule = (sampling.top_k, sampling.top_p, sampling.min_p)
            rows.setdefault(rule, []).append(row)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token for each request, and what was asked to be known about it."""

    tokens: Int[Tensor, " B"]
    logprobs: Float[Tensor, " B"]
    """[nats], under the distribution drawn from."""
    is_finite: Bool[Tensor, " B"]
    """Whether the row's logits were; elsewhere its draw means nothing."""
    kept_ids: tuple[tuple[int, ...], ...]
    """What each token was drawn from; () where it was the whole vocabulary or nobody asked."""
    raw_logprobs: Float[Tensor, " B"]
    """[nats] at temperature 1 over the whole vocabulary; 0 where nobody asked."""


def sample(
    logits_BV: Float[Tensor, "B V"],
    samplings: Sequence[Sampling],
    *,
    seeds: Sequence[int],
    positions: Sequence[int],
    allowed: Allowed = (),
) -> Sampled:
    """Draw one token per request by inverting its cumulative distribution.

    A token of probability zero is never drawn. Rows whose logits are not finite are reported. A row goes the same
    way whatever the others ask for, so its numbers do not depend on them.

    Args:
        logits_BV: raw logits of the next token.
        samplings: how each request is sampled.
        seeds: seed of each request.
        positions: how many tokens each request has sampled so far.
        allowed: what the constraint of each request allows next; empty where none has any.
    """
    draws_B = torch.from_numpy(uniforms(seeds, positions))
    tokens_B = torch.zeros(len(samplings), dtype=torch.long)
    logprobs_B = torch.zeros(len(samplings))
    is_finite_B = torch.zeros(len(samplings), dtype=torch.bool)
    kept_ids: list[tuple[int, ...]] = [()] * len(samplings)
    allowed = allowed or [None] * len(samplings)
    is_cut = [s.is_truncated or a is not None for s, a in zip(samplings, allowed, strict=True)]
    plain = [i for i, cut in enumerate(is_cut) if not cut]
    truncated = [i for i, cut in enumerate(is_cut) if cut]
    for rows in (plain, truncated):
        if not rows:
            continue
        own = [samplings[i] for i in rows]
        # All rows in their order are the usual case, and need no copy.
        logits = logits_BV if len(rows) == len(samplings) else logits_BV[rows]
        is_native = rows is plain and native_for(logits)
        draw = _drawn_natively if is_native else partial(_drawn, allowed=[allowed[i] for i in rows])
        tokens_B[rows], logprobs_B[rows], is_finite_B[rows], kept = draw(logits, own, draws_B[rows])
        for row, ids in zip(rows, kept, strict=False):
            kept_ids[row] = ids
    return Sampled(
        tokens=tokens_B,
        logprobs=logprobs_B,
        is_finite=is_finite_B,
        kept_ids=tuple(kept_ids),
        raw_logprobs=raw_logprobs(logits_BV, samplings, tokens_B),
    )


_Draw = tuple[Tensor, Tensor, Tensor, list[tuple[int, ...]]]
"""Tokens, log-probabilities, whether finite, and the kept ids of each row, or of none."""


def _drawn(
    logits_BV: Tensor, samplings: Sequence[Sampling], draws_B: Tensor, *, allowed: Allowed
) -> _Draw:
    is_finite_B = torch.isfinite(logits_BV).all(dim=-1)
    if not bool(is_finite_B.all()):
        logits_BV = torch.where(is_finite_B[:, None], logits_BV, 0.0)
    logprobs_BV = sampling_logprobs(logits_BV, samplings, allowed)
    cumulative_BV = logprobs_BV.exp().double().cumsum(dim=-1)
    tokens_B = torch.searchsorted(
        cumulative_BV, draws_B[:, None] * cumulative_BV[:, -1:], right=True
    )[:, 0]
    # Rounding can put a draw on the very end; the last token with any probability is the right one.
    last_B = torch.searchsorted(cumulative_BV, cumulative_BV[:, -1:].contiguous())[:, 0]
    tokens_B = torch.minimum(tokens_B, last_B)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    is_greedy = [s.temperature == 0 for s in samplings]
    if any(is_greedy):
        greedy_B = torch.tensor(is_greedy)
        tokens_B = torch.where(greedy_B, _only(logits_BV, allowed).argmax(dim=-1), tokens_B)
        chosen_B = chosen_B.masked_fill(greedy_B, 0.0)
    kept_ids = [
        kept_of(row, sampling) for row, sampling in zip(logprobs_BV, samplings, strict=True)
    ]
    return tokens_B, chosen_B, is_finite_B, kept_ids


def kept_of(logprobs: Float[Tensor, " V"], sampling: Sampling) -> tuple[int, ...]:
    """Return the ids that a row of ``sampling_logprobs`` leaves, () for all of them or where nobody asked."""
    if not (sampling.returns_kept_ids and sampling.is_truncated):
        return ()
    is_kept = logprobs > -math.inf
    return () if bool(is_kept.all()) else tuple(is_kept.nonzero()[:, 0].tolist())


def _drawn_natively(logits_BV: Tensor, samplings: Sequence[Sampling], draws_B: Tensor) -> _Draw:
    temperatures = [s.temperature for s in samplings]
    # The kernel divides by the temperature in place.
    is_scaled = any(t not in (0.0, 1.0) for t in temperatures)
    tokens_B, logprobs_B, is_finite_B = sample_rows(
        logits_BV.clone() if is_scaled else logits_BV.contiguous(),
        torch.tensor(temperatures, dtype=torch.float32),
        draws_B,
    )
    return tokens_B, logprobs_B, is_finite_B, []


def raw_logprobs(
    logits_BV: Float[Tensor, "B V"], samplings: Sequence[Sampling], tokens_B: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Return log-probabilities [nats] at temperature 1 over the whole vocabulary; 0 where nobody asked."""
    raw_B = torch.zeros(len(samplings))
    rows = [i for i, s in enumerate(samplings) if s.returns_raw_logprobs]
    if rows:
        whole = torch.log_softmax(logits_BV[rows].float(), dim=-1)
        raw_B[rows] = whole.gather(1, tokens_B[rows, None])[:, 0]
    return raw_B


def is_plain(samplings: Sequence[Sampling]) -> bool:
    """Whether the native steps can draw: temperature is all there is to a distribution, and no more is asked for."""
    return not any(
        s.is_truncated or s.constraint is not None or s.returns_raw_logprobs or s.stop_strings
        for s in samplings
    )
