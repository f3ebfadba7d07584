"""The arithmetic of one step: chunks of prompts, then tokens of running sequences, then what came of them.

Runs in the engine's worker thread, while the event loop leaves scheduler and requests alone. Sequences that end with
older weights are computed with those, in passes of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from longarc.engine.decoding import decode, drawn
from longarc.engine.request import Request
from longarc.engine.scheduler import Chunk, Scheduler
from longarc.engine.weights import EngineWeights
from longarc.errors import EngineError, EngineFaultError
from longarc.models.kernels.steps import Drawn, Interrupt
from longarc.records.sampling import FinishReason, SampledTokens

_MAX_STEPS = 16
"""Decode steps in one call; who wants a turn interrupts it, so this only bounds how old `health` can be."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What all steps have in common."""

    attention: Literal["dense", "sparse"]
    max_prefill_tokens: int
    """Of one step [tokens]."""
    interrupt: Interrupt
    """Ends a call of several decode steps."""


class StepComputer:
    """Computes steps as the scheduler has planned them."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: StepSettings,
        *,
        deliver: Callable[[Request, SampledTokens | EngineError], None],
    ) -> None:
        """Bind what a step needs.

        Args:
            scheduler: says who is computed, and is told what was.
            settings: of all steps.
            deliver: called from the worker thread with what a request gets.
        """
        self._scheduler = scheduler
        self._settings = settings
        self._deliver = deliver
        self.num_sampled = 0
        """Tokens since the beginning."""

    @torch.inference_mode()
    def step(self, current: EngineWeights) -> None:
        """Compute one step.

        Args:
            current: compute every sequence that has no weights of its own.
        """
        if self._scheduler.prefilling:
            chunks = self._scheduler.chunks(self._settings.max_prefill_tokens)
            for weights, some in _by_weights(chunks, lambda chunk: chunk.request, current):
                self._prefill(some, weights)
        if self._scheduler.running:
            # Another prefill is due: a single step, so that the others do not wait for it longer than before.
            max_steps = 1 if self._scheduler.prefilling else _MAX_STEPS
            max_steps = self._scheduler.make_room(max_steps)
            running = list(self._scheduler.running)
            for weights, requests in _by_weights(running, lambda request: request, current):
                self._decode(requests, weights, max_steps)

    def _prefill(self, chunks: Sequence[Chunk], weights: EngineWeights) -> None:
        seats = [chunk.request.used_seat() for chunk in chunks]
        hidden = weights.model.extend(
            torch.from_numpy(np.concatenate([chunk.tokens for chunk in chunks])),
            [seat.index for seat in seats],
            [seat.length for seat in seats],
            [len(chunk.tokens) for chunk in chunks],
            weights.cache,
            attention=self._settings.attention,
            ends_only=True,
        )
        complete = [row for row, chunk in enumerate(chunks) if self._scheduler.note_computed(chunk)]
        if complete:
            requests = [chunks[row].request for row in complete]
            logits = weights.model.logits(hidden[complete], weights.cache)
            self._record_all(requests, drawn(logits, requests), weights)

    def _decode(self, requests: list[Request], weights: EngineWeights, max_steps: int) -> None:
        drawn = decode(
            weights.model,
            weights.cache,
            requests,
            attention=self._settings.attention,
            max_steps=max_steps,
            interrupt=self._settings.interrupt,
        )
        for request, token_ids in zip(requests, drawn.tokens.T.tolist(), strict=True):
            self._scheduler.seats.write(request.used_seat(), [request.last_token, *token_ids[:-1]])
        self._record_all(requests, drawn, weights)

    def _record_all(
        self, requests: Sequence[Request], drawn: Drawn, weights: EngineWeights
    ) -> None:
        self.num_sampled += drawn.tokens.numel()
        all_tokens, all_logprobs = drawn.tokens.T.tolist(), drawn.logprobs.T.tolist()
        for index, request in enumerate(requests):
            request.unsent_version = weights.policy_version
            token_ids, logprobs = all_tokens[index], all_logprobs[index]
            if bool(drawn.is_finite[index]):
                kept = drawn.kept_ids[index : index + 1]
                raw = drawn.raw_logprobs[index : index + 1]
                self._record(request, token_ids, logprobs, kept, raw)
                continue
            # Only native steps make several, and they neither leave tokens out nor tell raw log-probabilities.
            self._record(request, token_ids[:-1], logprobs[:-1], (), ())
            self._finish(
                request,
                EngineFaultError(
                    f"logits are not finite at token {request.num_sampled} of session {request.session_id}, "
                    f"policy version {weights.policy_version}"
                ),
            )

    def _record(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[float],
        kept_ids: Sequence[tuple[int, ...]],
        raw_logprobs: Sequence[float],
    ) -> None:
        """Note what was sampled; only the last of the tokens can end the completion."""
        if not token_ids:
            return
        request.note(token_ids, logprobs, kept_ids, raw_logprobs)
        ending = request.ending()
        if ending is not None:
            self._finish(request, ending)
        elif len(request.unsent_ids) >= request.sampling.stream_interval_tokens > 0:
            self.send(request, None)

    def _finish(self, request: Request, ending: FinishReason | EngineError) -> None:
        # Rows behind logits that are not finite may be at fault themselves.
        self._scheduler.finish(request, is_sound=not isinstance(ending, EngineError))
        self.send(request, ending)

    def send(self, request: Request, ending: FinishReason | EngineError | None) -> None:
        """Hand over what was sampled since the last piece; called from the worker and the event loop."""
        if request.unsent_ids or isinstance(ending, str):
            reason = ending if isinstance(ending, str) else None
            self._deliver(request, request.piece(request.unsent_version, reason))
        if isinstance(ending, EngineError):
            self._deliver(request, ending)


def _by_weights(
    items: Sequence[T], request_of: Callable[[T], Request], current: EngineWeights
) -> list[tuple[EngineWeights, list[T]]]:
    """Return the items of each weights, in their order."""
    groups: dict[int, tuple[EngineWeights, list[T]]] = {}
    for item in items:
        weights = request_of(item).weights or current
        groups.setdefault(id(weights), (weights, []))[1].append(item)
    return list(groups.values())
