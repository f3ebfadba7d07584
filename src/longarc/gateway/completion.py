"""One completion, collected from the pieces an engine streams."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from longarc.errors import ContractError, EngineError
from longarc.gateway.tree import id_array
from longarc.records.ports import Engine
from longarc.records.sampling import FinishReason, SampledTokens, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled. Arrays have one length L >= 1."""

    sampled_ids: "array[int]"
    logprobs: "array[float]"
    version_runs: tuple[tuple[int, int], ...]
    """(policy version [optimizer steps], number of ids), runs of unequal versions."""
    finish_reason: FinishReason
    kept_ids: tuple[tuple[int, ...], ...] = ()
    """Of each id, what it was drawn from; () for the whole vocabulary. Empty where that holds for all."""
    routing: tuple[bytes, ...] = ()
    """Of each position from ``sampling.returns_routing_from`` to the one that drew the last id; empty where nobody
    asked."""


async def collect(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    session_id: str,
    check: Callable[[], None],
    on_piece: Callable[[SampledTokens], None] | None = None,
) -> Completion:
    """Sample one completion; each token keeps the version of the weights that sampled it.

    Args:
        engine: who samples.
        prompt_ids: the whole prompt.
        sampling: how.
        session_id: for the engine's cache, and for messages.
        check: called after every piece; raising cancels the request.
        on_piece: gets every piece after its check; raising cancels the request.

    Raises:
        EngineError: the engine failed, cancelled the request or gave a log-probability that is no number.
        ContractError: what it streamed is not one well-formed completion.
    """
    pieces: list[SampledTokens] = []
    stream = engine.stream(prompt_ids, sampling, session_id=session_id)
    try:
        async for piece in stream:
            check()
            pieces.append(piece)
            if on_piece is not None:
                on_piece(piece)
            if piece.finish_reason is not None:
                break
    finally:
        # AsyncIterator does not promise aclose, generators have it; it is what cancels a request.
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
    completion = _joined(pieces, session_id=session_id)
    first = sampling.returns_routing_from
    num_drawing = len(prompt_ids) + len(completion.sampled_ids) - 1
    expected = 0 if first is None else num_drawing - first
    if len(completion.routing) != expected:
        raise ContractError(
            f"session {session_id}: the engine said of {len(completion.routing)} positions what they were routed to, "
            f"asked was {expected} (returns_routing_from={first}); it has to say it of each"
        )
    return completion


def _joined(pieces: Sequence[SampledTokens], *, session_id: str) -> Completion:
    finish_reason = pieces[-1].finish_reason if pieces else None
    if finish_reason is None or finish_reason == "cancelled":
        raise EngineError(
            f"session {session_id}: the engine ended a completion after {len(pieces)} pieces with finish "
            f"reason {finish_reason}, which is neither stop nor length; the turn does not count"
        )
    ids, logprobs = id_array(), array("d")
    kept: list[tuple[int, ...]] = []
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        if len(piece.token_ids) != len(piece.logprobs):
            raise ContractError(
                f"session {session_id}: the engine streamed {len(piece.token_ids)} ids with "
                f"{len(piece.logprobs)} log-probabilities; each id needs one"
            )
        if len(piece.kept_ids) not in (0, len(piece.token_ids)):
            raise ContractError(
                f"session {session_id}: the engine streamed {len(piece.token_ids)} ids and said of "
                f"{len(piece.kept_ids)} what they were drawn from; it has to say it of each or of none"
            )
        kept.extend(piece.kept_ids or [()] * len(piece.token_ids))
        ids.extend(piece.token_ids)
        logprobs.extend(piece.logprobs)
        if not piece.token_ids:
            continue
        if runs and runs[-1][0] == piece.policy_version:
            runs[-1] = (piece.policy_version, runs[-1][1] + len(piece.token_ids))
        else:
            runs.append((piece.policy_version, len(piece.token_ids)))
    if not ids:
        raise EngineError(f"session {session_id}: the engine ended a completion without a token")
    if not all(map(math.isfinite, logprobs)):
        position = next(i for i, value in enumerate(logprobs) if not math.isfinite(value))
        raise EngineError(
            f"session {session_id}: the log-probability of sampled token {position} is "
            f"{logprobs[position]}; the model's logits are not finite"
        )
    return Completion(
        sampled_ids=ids,
        logprobs=logprobs,
        version_runs=tuple(runs),
        finish_reason=finish_reason,
        kept_ids=tuple(kept) if any(kept) else (),
        routing=tuple(chain.from_iterable(piece.routing for piece in pieces)),
    )
