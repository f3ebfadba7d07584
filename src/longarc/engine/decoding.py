"""Decode steps of running requests: many in one native call where that is possible, else one.

Shape letters: S steps, B requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.engine.request import Request
from longarc.engine.sampler import is_plain, sample, uniforms
from longarc.engine.weights import EngineWeights
from longarc.models.decoder_base import Attention
from longarc.models.kernels.decode import NativeDecoder
from longarc.models.kernels.steps import Drawn, Draws, Interrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What some steps drew for one request."""

    token_ids: list[int]
    """At least one."""
    logprobs: list[float]
    """Of the tokens [nats]."""
    is_finite: bool
    """Whether the logits of the last token were; where not, it means nothing."""
    kept_ids: Sequence[tuple[int, ...]] = ()
    """What each token was drawn from, () for the whole vocabulary. Empty where nobody asked."""
    raw_logprobs: Sequence[float] = ()
    """log-probabilities [nats] at temperature 1 over the whole vocabulary. Empty likewise."""


class Decoding:
    """One token of each request in a step."""

    max_step_tokens = 1
    """Most tokens that a step draws for a request."""

    keeps_newest_token = False
    """Whether the newest token of what is known is left to a step."""

    def __init__(self, *, attention: Attention) -> None:
        """Draw from models that attend like this."""
        self._attention = attention
        self.num_drafted: list[int] = []
        """Drafts that were verified so far, by depth."""
        self.num_accepted: list[int] = []
        """Drafts that stayed, by depth."""

    def prefill(
        self,
        weights: EngineWeights,
        token_ids: Int[Tensor, " new"],
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Float[Tensor, "B hidden"]:
        """Compute known tokens and return the state of each sequence's last one; see ``Decoder.extend``."""
        return weights.model.extend(
            token_ids,
            slots,
            starts,
            counts,
            weights.cache,
            attention=self._attention,
            ends_only=True,
        )

    def first_tokens(
        self,
        weights: EngineWeights,
        hidden_BH: Float[Tensor, "B hidden"],
        requests: Sequence[Request],
    ) -> list[Advance]:
        """Draw the token behind what ``prefill`` computed."""
        return _advances(_drawn(weights.model.logits(hidden_BH, weights.cache), requests))

    def decode(
        self,
        weights: EngineWeights,
        requests: Sequence[Request],
        *,
        max_steps: int,
        interrupt: Interrupt,
    ) -> list[Advance]:
        """Append to each request its last token and draw what follows, for one step or up to ``max_steps``.

        No step follows one in which a request ends or a piece of it is due. Seats have room for the tokens; they and
        the requests are left as they are.
        """
        return _advances(self._steps(weights, requests, max_steps, interrupt))

    def _steps(
        self,
        weights: EngineWeights,
        requests: Sequence[Request],
        max_steps: int,
        interrupt: Interrupt,
    ) -> Drawn:
        cache = weights.cache
        seats = [request.used_seat() for request in requests]
        indices = [seat.index for seat in seats]
        starts = [seat.length for seat in seats]
        samplings = [request.sampling for request in requests]
        tokens_B = torch.tensor([request.last_token for request in requests])
        is_sparse = self._attention == "sparse"
        if isinstance(cache, NativeDecoder) and is_plain(samplings):
            seeds = [request.seed for request in requests]
            positions_B = np.asarray([request.draw_position for request in requests])
            draws = Draws(
                temperatures=torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
                uniforms=torch.from_numpy(
                    uniforms(seeds, positions_B[None, :] + np.arange(max_steps)[:, None])
                ),
                stop_ids=[s.stop_ids for s in samplings],
            )
            return cache.steps(tokens_B, indices, starts, draws, interrupt, is_sparse=is_sparse)
        hidden = weights.model.extend(
            tokens_B, indices, starts, [1] * len(requests), cache, attention=self._attention
        )
        return _drawn(weights.model.logits(hidden, cache), requests)


def _drawn(logits_BV: Float[Tensor, "B V"], requests: Sequence[Request]) -> Drawn:
    sampled = sample(
        logits_BV,
        [request.sampling for request in requests],
        seeds=[request.seed for request in requests],
        positions=[request.draw_position for request in requests],
        allowed=[request.allowed() for request in requests],
    )
    return Drawn(
        sampled.tokens[None],
        sampled.logprobs[None],
        sampled.is_finite,
        kept_ids=sampled.kept_ids,
        raw_logprobs=sampled.raw_logprobs.tolist(),
    )


def _advances(drawn: Drawn) -> list[Advance]:
    columns = zip(
        drawn.tokens.T.tolist(), drawn.logprobs.T.tolist(), drawn.is_finite.tolist(), strict=True
    )
    return [
        Advance(
            token_ids=token_ids,
            logprobs=logprobs,
            is_finite=is_finite,
            kept_ids=drawn.kept_ids[row : row + 1],
            raw_logprobs=drawn.raw_logprobs[row : row + 1],
        )
        for row, (token_ids, logprobs, is_finite) in enumerate(columns)
    ]
