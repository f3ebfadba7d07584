"""The arithmetic of one step: chunks of prompts, then tokens of running sequences, then what came of them.

Runs in the engine's worker thread, while the event loop leaves scheduler and requests alone. Sequences that end with
older weights are computed with those, in passes of their own.

A pass that raises is made again with each half of its sequences, and so on, until one is alone with what raises: that
one ends, the others go on. Scheduler and requests are told only of passes that did not raise, and a row that is
written twice is the same row; where layers keep memories instead, which a pass that raised has spoilt, its sequences begin
again and are computed one by one. Then a token of nobody's is computed: where that raises too, it is the engine.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch

from longarc.engine.decoding import Advance, Decoding
from longarc.engine.faults import fault_of
from longarc.engine.request import Request
from longarc.engine.scheduler import Chunk, Scheduler
from longarc.engine.weights import EngineWeights
from longarc.errors import (
    EngineError,
    EngineFaultError,
    EngineLostError,
    LongArcError,
    boundary,
)
from longarc.models.kernels.steps import Interrupt
from longarc.records.sampling import FinishReason, SampledTokens, Sampling

_log = logging.getLogger(__name__)

_MAX_STEPS = 16
"""Decode steps in one call; who wants a turn interrupts it, so this only bounds how old `health` can be."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What all steps have in common."""

    attention: Literal["dense", "sparse"]
    max_prefill_tokens: int
    """Of one step [tokens]."""
    interrupt: Interrupt
    """Ends a call of several decode steps."""
    decoding: Decoding
    """How tokens are drawn."""


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
        self._suspects: set[Request] = set()
        """Of a pass that raised, where it cannot be made again: each is computed alone until it has sampled."""
        self.num_sampled = 0
        """Tokens since the beginning."""

    @torch.inference_mode()
    def step(self, current: EngineWeights) -> None:
        """Compute one step.

        Args:
            current: compute every sequence that has no weights of its own.

        Raises:
            EngineLostError: the machine lacks something, or nothing at all can be computed.
        """
        self._suspects.intersection_update(self._scheduler.begun())
        if self._scheduler.prefilling:
            chunks = self._scheduler.chunks(self._settings.max_prefill_tokens)
            for weights, some in self._passes(chunks, _request_of_chunk, current):
                self._prefill(some, weights)
        if self._scheduler.running:
            # Another prefill is due: a single step, so that the others do not wait for it longer than before.
            max_steps = 1 if self._scheduler.prefilling else _MAX_STEPS
            max_steps = self._scheduler.make_room(
                max_steps, max_step_tokens=self._settings.decoding.max_step_tokens
            )
            running = list(self._scheduler.running)
            for weights, requests in self._passes(running, _itself, current):
                self._decode(requests, weights, max_steps)

    def _passes(
        self, items: Sequence[T], request_of: Callable[[T], Request], current: EngineWeights
    ) -> list[tuple[EngineWeights, list[T]]]:
        """Return what is computed together: the items of one set of weights, and each suspect by itself."""
        groups: dict[tuple[int, int], tuple[EngineWeights, list[T]]] = {}
        for item in items:
            request = request_of(item)
            weights = request.weights or current
            key = (id(weights), id(request) if request in self._suspects else 0)
            groups.setdefault(key, (weights, []))[1].append(item)
        return list(groups.values())

    def _prefill(self, chunks: list[Chunk], weights: EngineWeights) -> None:
        done = self._computed(
            chunks, _request_of_chunk, partial(self._prefill_pass, weights), weights
        )
        for some, found in done:
            drawing = [chunk.request for chunk in some if _draws_after(chunk)]
            for chunk in some:
                self._scheduler.note_computed(chunk)
            self._record_all(drawing, found, weights)

    def _prefill_pass(self, weights: EngineWeights, chunks: Sequence[Chunk]) -> list[Advance]:
        """Compute chunks; return what the sequences that are complete then draw."""
        seats = [chunk.request.used_seat() for chunk in chunks]
        decoding = self._settings.decoding
        hidden = decoding.prefill(
            weights,
            torch.from_numpy(np.concatenate([chunk.tokens for chunk in chunks])),
            [seat.index for seat in seats],
            [seat.length for seat in seats],
            [len(chunk.tokens) for chunk in chunks],
        )
        rows = [row for row, chunk in enumerate(chunks) if _draws_after(chunk)]
        if not rows:
            return []
        return decoding.first_tokens(weights, hidden[rows], [chunks[row].request for row in rows])

    def _decode(self, requests: list[Request], weights: EngineWeights, max_steps: int) -> None:
        compute = partial(self._decode_pass, weights, max_steps)
        for some, found in self._computed(requests, _itself, compute, weights):
            for request, advance in zip(some, found, strict=True):
                self._scheduler.seats.write(
                    request.used_seat(), [request.last_token, *advance.token_ids[:-1]]
                )
            self._suspects.difference_update(some)
            self._record_all(some, found, weights)

    def _decode_pass(
        self, weights: EngineWeights, max_steps: int, requests: Sequence[Request]
    ) -> list[Advance]:
        return self._settings.decoding.decode(
            weights, requests, max_steps=max_steps, interrupt=self._settings.interrupt
        )

    def _computed(
        self,
        items: list[T],
        request_of: Callable[[T], Request],
        compute: Callable[[list[T]], R],
        weights: EngineWeights,
    ) -> list[tuple[list[T], R]]:
        """Return what a pass computes of all items, or passes over parts of them; who cannot be computed ends.

        Raises:
            EngineLostError: the machine lacks something, or not even a token of nobody's can be computed.
        """
        try:
            with boundary(EngineFaultError, "the engine failed"):
                return [(items, compute(items))]
        except LongArcError as error:
            if isinstance(error.__cause__, MemoryError | OSError):  # it is the machine
                raise EngineLostError(str(error)) from error.__cause__
            if len(items) == 1:
                self._end_alone(request_of(items[0]), error, weights)
                return []
        if not self._scheduler.seats.can_branch:
            requests = [request_of(item) for item in items]
            self._suspects.update(requests)
            for request in requests:
                self._scheduler.restart(request, is_sound=False)
            return []
        half = len(items) // 2
        return [
            *self._computed(items[:half], request_of, compute, weights),
            *self._computed(items[half:], request_of, compute, weights),
        ]

    def _end_alone(self, request: Request, error: LongArcError, weights: EngineWeights) -> None:
        fault = EngineFaultError(
            f"a token of session {request.session_id} could not be computed, even with no other sequence: {error}"
        )
        fault.__cause__ = error
        _log.warning("%s", fault, exc_info=error)
        self._finish(request, fault)
        self._check_engine(weights, error)

    def _check_engine(self, weights: EngineWeights, error: LongArcError) -> None:
        """Compute two tokens of nobody's, as any request's are.

        Raises:
            EngineLostError: they cannot be computed.
        """
        seats = self._scheduler.seats
        nobody = Request(
            np.zeros(1, dtype=np.int64), Sampling(max_new_tokens=2), "the engine itself", seed=0
        )
        nobody.known = nobody.prompt
        # Whoever ended just now left the pages for it.
        nobody.seat = seats.take(nobody.prompt, seats.nothing(), num_spare=0)
        if nobody.seat is None:
            return
        try:
            with boundary(EngineError, "the engine failed"):
                first = self._prefill_pass(weights, [Chunk(nobody, nobody.known)])
                seats.write(nobody.seat, nobody.known)
                nobody.note(first[0].token_ids, [0.0], (), ())
                self._decode_pass(weights, 1, [nobody])
        except LongArcError:
            raise EngineLostError(str(error)) from error
        finally:
            seats.release(nobody.seat, is_sound=False)

    def _record_all(
        self, requests: Sequence[Request], advances: Sequence[Advance], weights: EngineWeights
    ) -> None:
        for request, advance in zip(requests, advances, strict=True):
            request.unsent_version = weights.policy_version
            num_sound = len(advance.token_ids) - (not advance.is_finite)
            goes_on = self._record(request, advance, num_sound, weights)
            if goes_on and not advance.is_finite:
                self._finish(request, self._not_finite(request, weights))

    def _not_finite(self, request: Request, weights: EngineWeights) -> EngineFaultError:
        where = fault_of(weights.model, request.tokens(), attention=self._settings.attention)
        return EngineFaultError(
            f"logits are not finite at token {request.num_sampled} of session {request.session_id}, policy version "
            f"{weights.policy_version}: {where}"
        )

    def _record(
        self, request: Request, advance: Advance, num_sound: int, weights: EngineWeights
    ) -> bool:
        """Note what was sampled, up to what ends the completion; return whether nothing did."""
        count, ending = request.ending_among(advance.token_ids[:num_sound])
        self.num_sampled += count
        if count == 0:
            return True
        request.note(
            advance.token_ids[:count],
            advance.logprobs[:count],
            advance.kept_ids[:count],
            advance.raw_logprobs[:count],
        )
        if request.sampling.returns_routing_from is not None:
            # Now, while the rows are those of the passes that drew these tokens: other weights may compute them again.
            new = request.unrouted(request.sampling.returns_routing_from)
            slot = request.used_seat().index
            request.note_routing(weights.cache.routing_of(slot, new.start, new.stop), new.stop)
        if ending is not None:
            self._finish(request, ending)
        elif len(request.unsent_ids) >= request.sampling.stream_interval_tokens > 0:
            self.send(request, None)
        return ending is None

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


def _itself(request: Request) -> Request:
    return request


def _request_of_chunk(chunk: Chunk) -> Request:
    return chunk.request


def _draws_after(chunk: Chunk) -> bool:
    """Whether a chunk is the last that its sequence needs before it draws."""
    request = chunk.request
    return len(chunk.tokens) == request.num_missing and not request.has_newest_token
