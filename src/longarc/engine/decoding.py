"""Decode steps of running requests: many in one native call where that is possible, else one.

Shape letters: S steps, B requests.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from longarc.engine.request import Request
from longarc.engine.sampler import is_plain, sample, uniforms
from longarc.models.cache import PagedCache
from longarc.models.decoder_base import Decoder
from longarc.models.kernels.decode import NativeDecoder
from longarc.models.kernels.steps import Drawn, Draws, Interrupt


def decode(
    model: Decoder,
    cache: PagedCache,
    requests: Sequence[Request],
    *,
    attention: Literal["dense", "sparse"],
    max_steps: int,
    interrupt: Interrupt,
) -> Drawn:
    """Append to each request its last token and draw what follows, for one step or up to ``max_steps``.

    No step follows one in which a request ends or a piece of it is due, so all steps have the same rows.
    Seats have room for the tokens; they and the requests are left as they are.
    """
    seats = [request.used_seat() for request in requests]
    indices = [seat.index for seat in seats]
    starts = [seat.length for seat in seats]
    samplings = [request.sampling for request in requests]
    seeds = [request.seed for request in requests]
    positions = [request.draw_position for request in requests]
    tokens_B = torch.tensor([request.last_token for request in requests])
    if isinstance(cache, NativeDecoder) and is_plain(samplings):
        positions_SB = np.asarray(positions)[None, :] + np.arange(max_steps)[:, None]
        draws = Draws(
            temperatures=torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
            uniforms=torch.from_numpy(uniforms(seeds, positions_SB)),
            stop_ids=[s.stop_ids for s in samplings],
        )
        return cache.steps(
            tokens_B, indices, starts, draws, interrupt, is_sparse=attention == "sparse"
        )
    hidden = model.extend(
        tokens_B, indices, starts, [1] * len(requests), cache, attention=attention
    )
    return drawn(model.logits(hidden, cache), requests)


def drawn(logits_BV: Float[Tensor, "B V"], requests: Sequence[Request]) -> Drawn:
    """Draw the next token of each request."""
    sampled = sample(
        logits_BV,
        [request.sampling for request in requests],
        seeds=[request.seed for request in requests],
        positions=[request.draw_position for request in requests],
    )
    return Drawn(
        sampled.tokens[None],
        sampled.logprobs[None],
        sampled.is_finite,
        kept_ids=sampled.kept_ids,
        raw_logprobs=sampled.raw_logprobs.tolist(),
    )
