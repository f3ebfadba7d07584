"""The embedded engine: continuous batching over the model's own incremental forward.

::

    stream() --request--> scheduler: waiting (bounded) --> prefilling --> running --token--> request.pieces
                             ^ pushes back                   | chunks       | one token each per decode step

One asyncio task (``_drive``) plans every step and touches all state; the arithmetic of a step runs in one
worker thread, so the event loop stays free and no lock is needed. Weights are swapped between two steps.
``_drive`` consumes what waits, produces pieces, waits for ``_wake``, and is unblocked by ``stream`` and
``update_weights``. Who is computed when, and where its rows lie, is the scheduler's business.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch

from longarc.config.engine import EngineConfig
from longarc.engine.decoding import decode, drawn
from longarc.engine.request import Request, check_scoring, checked_prompt
from longarc.engine.sampler import seed_of_request
from longarc.engine.scheduler import Scheduler
from longarc.engine.seats import SeatTable
from longarc.engine.stop_strings import TokenBytes
from longarc.errors import (
    ContractError,
    EngineBusyError,
    EngineError,
    EngineFaultError,
    EngineLostError,
    EngineRequestError,
    LongArcError,
    WeightsRefusedError,
    boundary,
)
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights
from longarc.models.kernels.steps import Drawn, Interrupt
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.models.threads import set_compute_threads
from longarc.records.sampling import (
    EngineHealth,
    FinishReason,
    SampledTokens,
    Sampling,
    WeightSource,
)
from longarc.runs.checkpoint import file_sha256

_log = logging.getLogger(__name__)

_MAX_STEPS = 16
"""Decode steps in one call; who wants a turn interrupts it, so this only bounds how old `health` can be."""


@dataclass(slots=True)
class _Counters:
    sampled: int = 0
    busy_s: float = 0.0


class EmbeddedEngine:
    """Samples from a model in this process; satisfies the `Engine` port."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        max_context_tokens: int,
        policy_version: int = 0,
        attention: Literal["dense", "sparse"] = "sparse",
        seed: int = 0,
        token_bytes: TokenBytes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over ``model``.

        Args:
            model: is only read, but for new weights.
            config: see the fields.
            max_context_tokens: longest prompt and completion together [tokens].
            policy_version: version [optimizer steps] of the weights.
            attention: how the model was trained to attend.
            seed: of the completions that bring none.
            token_bytes: of the tokenizer; without it stop strings are refused.
            clock: monotonic [seconds].

        Raises:
            ConfigError: the cache is too small for one sequence of the longest context.
        """
        num_pages = config.num_pages_for(max_context_tokens)
        self._token_bytes = token_bytes
        self._model = model.eval().requires_grad_(False)
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._version = policy_version
        self._num_updates = 0
        self._attention: Literal["dense", "sparse"] = attention
        self._seed = seed
        self._clock = clock
        self._cache = model.new_cache(
            # A sequence that ended keeps its seat where layers remember instead of keeping rows.
            config.max_running + config.max_running // 2,
            max_context_tokens,
            num_pages=num_pages,
            page_tokens=config.page_tokens,
        )
        # Its queue is bounded by config.max_waiting.
        self._scheduler = Scheduler(
            SeatTable(self._cache, salt=self._salt()), max_running=config.max_running
        )
        self._pending_weights: deque[tuple[WeightSource, int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self._interrupt = Interrupt()
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=self._set_threads
        )
        self._driver: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._has_failed = asyncio.Event()
        self._num_requests = 0
        self._counters = _Counters()
        self._instance_id = secrets.token_hex(8)

    def _set_threads(self) -> None:
        set_compute_threads(self._config.num_threads)

    async def __aenter__(self) -> Self:
        self._driver = asyncio.create_task(self._drive(), name="engine")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop; whatever is still running gets an error."""
        self._failure = self._failure or EngineLostError("the engine was closed")
        if self._driver is not None:
            self._driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._driver
            self._driver = None
        # The step that is being computed ends first: what it works on is about to go.
        self._interrupt.set()
        self._pool.shutdown(wait=True)
        self._fail_all(self._failure)
        # Now and not when the garbage collector comes by: it can be gigabytes, and another engine may follow.
        with contextlib.suppress(AttributeError):  # closed before
            del self._cache
            self._scheduler.seats.close()

    @property
    def failure(self) -> EngineError | None:
        """Why no request is answered any more: the engine failed or was closed; None while they are."""
        return self._failure

    async def failed(self) -> None:
        """Wait until the engine has failed; to close it is no failure."""
        await self._has_failed.wait()

    # The Engine port -------------------------------------------------------------------------

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Sample one completion; see `longarc.records.ports.Engine`."""
        request = self._accept(prompt_ids, sampling, session_id)
        try:
            while True:
                piece = await request.pieces.get()
                if isinstance(piece, EngineError):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            request.is_cancelled = True
            self._notify()

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats]; 0.0 for the first token."""
        if self._failure is not None:
            raise self._failure
        check_scoring(
            token_ids,
            temperature,
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._model.config.vocab_size,
        )
        loop = asyncio.get_running_loop()
        self._interrupt.set()
        return await loop.run_in_executor(self._pool, self._score, list(token_ids), temperature)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Swap the weights between two decode steps; returns when the new ones are in use."""
        if self._failure is not None:
            raise self._failure
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending_weights.append((source, policy_version, done))
        self._notify()
        await done

    async def health(self) -> EngineHealth:
        """Say what the engine is doing."""
        scheduler, seats = self._scheduler, self._scheduler.seats
        return EngineHealth(
            is_ready=self._failure is None and self._driver is not None,
            policy_version=self._version,
            num_running=scheduler.num_active,
            num_waiting=scheduler.num_waiting,
            num_sampled_tokens=self._counters.sampled,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_free_pages=seats.pages.num_free,
            num_cached_pages=seats.pages.num_cached + seats.num_kept,
            num_used_pages=seats.pages.num_used - seats.num_kept,
            busy_s=self._counters.busy_s,
            instance_id=self._instance_id,
        )

    # Planning: only ever on the event loop --------------------------------------------------

    def _notify(self) -> None:
        """Something is to be planned: end the wait, or the steps being computed."""
        self._wake.set()
        self._interrupt.set()

    def _accept(self, prompt_ids: Sequence[int], sampling: Sampling, session_id: str) -> Request:
        if self._failure is not None:
            raise self._failure
        if self._driver is None:
            raise EngineLostError("the engine is not running; enter it with `async with` first")
        if sampling.stop_strings and self._token_bytes is None:
            raise EngineRequestError(
                f"stop_strings={list(sampling.stop_strings)} need the text of tokens, which this engine was not "
                f"given; send stop_ids, or open the engine with token_bytes"
            )
        prompt = checked_prompt(
            prompt_ids,
            sampling,
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._model.config.vocab_size,
        )
        # Who waits for pages though there is a seat does not count: the engine promised to take as many.
        num_waiting = (
            self._scheduler.num_active + self._scheduler.num_waiting - self._config.max_running
        )
        if num_waiting >= self._config.max_waiting:
            raise EngineBusyError(
                f"{num_waiting} requests wait already (max_waiting={self._config.max_waiting}); "
                f"send fewer at once or raise engine.max_waiting"
            )
        self._num_requests += 1
        seed = (
            sampling.seed
            if sampling.seed is not None
            else seed_of_request(self._seed, self._num_requests)
        )
        request = Request(
            prompt=prompt,
            sampling=sampling,
            session_id=session_id,
            seed=seed,
            arrival=self._num_requests,
        )
        if sampling.stop_strings and self._token_bytes is not None:
            request.watch_for_stop_strings(self._token_bytes)
        self._scheduler.waiting.append(request)
        self._notify()
        return request

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with boundary(EngineLostError, "the engine failed"):
                while True:
                    await self._one_step(loop)
        except LongArcError as error:
            # Ends every request with the reason; later requests are refused with it too.
            _log.error("no request can be answered any more: %s", error, exc_info=error)
            self._failure = EngineLostError(str(error))
            self._has_failed.set()
            self._fail_all(
                self._failure, fault=error if isinstance(error, EngineFaultError) else None
            )

    async def _computed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Compute a step. One of its requests may be what cannot be computed, and would fail anywhere."""
        try:
            with boundary(EngineFaultError, "the engine failed"):
                await loop.run_in_executor(self._pool, self._compute)
        except EngineFaultError as error:
            if isinstance(error.__cause__, MemoryError | OSError):  # it is the machine
                raise EngineLostError(str(error)) from error.__cause__
            raise

    async def _one_step(self, loop: asyncio.AbstractEventLoop) -> None:
        self._interrupt.clear()
        await self._apply_weights(loop)
        self._scheduler.drop_cancelled()
        self._scheduler.admit()
        if self._scheduler.num_active:
            await self._computed(loop)
            # Lets the consumers of finished requests run before the next step is planned.
            await asyncio.sleep(0)
            return
        self._wake.clear()
        if not self._scheduler.num_waiting and not self._pending_weights:
            await self._wake.wait()

    async def _apply_weights(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._pending_weights:
            source, version, done = self._pending_weights.popleft()
            try:
                await loop.run_in_executor(self._pool, self._load, source)
            except (ContractError, OSError) as error:
                if not done.done():
                    done.set_exception(
                        WeightsRefusedError(f"weights {version} were not loaded: {error}")
                    )
                continue
            for request in self._scheduler.begun():
                self._send(request, None)
            self._version = version
            self._num_updates += 1
            self._scheduler.seats.renew(self._salt())
            if not done.done():
                done.set_result(None)

    def _salt(self) -> str:
        """Name the weights; versions may come twice, after a resume for example."""
        return f"{self._num_updates}:{self._version}"

    def _fail_all(self, error: EngineError, *, fault: EngineError | None = None) -> None:
        """End all requests with ``error``; those of the step that failed with ``fault`` where there is one."""
        computed = {id(r) for r in (*self._scheduler.prefilling, *self._scheduler.running)}
        for request in self._scheduler.clear():
            request.pieces.put_nowait(fault if fault and id(request) in computed else error)
        while self._pending_weights:
            _, _, done = self._pending_weights.popleft()
            if not done.done():
                done.set_exception(error)

    # Arithmetic: only ever in the worker thread, while the event loop leaves the state alone ------

    @torch.inference_mode()
    def _score(self, token_ids: list[int], temperature: float) -> list[float]:
        ids = torch.tensor(token_ids)
        output = self._model(ids, Layout.documents([len(token_ids)]), attention=self._attention)
        logprobs, _ = token_logprobs(
            output.hidden[:-1],
            self._model.output_weight,
            ids[1:],
            temperature=temperature,
            compute_dtype=self._model.compute_dtype,
        )
        return [0.0, *logprobs.tolist()]

    def _load(self, source: WeightSource) -> None:
        with boundary(ContractError, f"reading {source.path!r}"):
            found = file_sha256(Path(source.path))
        if found != source.sha256:
            raise ContractError(
                f"{source.path} has digest {found[:12]}, announced was {source.sha256[:12]}; publish again"
            )
        load_weights(self._model, source.path)

    @torch.inference_mode()
    def _compute(self) -> None:
        started = self._clock()
        if self._scheduler.prefilling:
            self._prefill()
        if self._scheduler.running:
            self._decode()
        self._counters.busy_s += self._clock() - started

    def _prefill(self) -> None:
        chunks = self._scheduler.chunks(self._config.max_prefill_tokens)
        seats = [chunk.request.used_seat() for chunk in chunks]
        hidden = self._model.extend(
            torch.from_numpy(np.concatenate([chunk.tokens for chunk in chunks])),
            [seat.index for seat in seats],
            [seat.length for seat in seats],
            [len(chunk.tokens) for chunk in chunks],
            self._cache,
            attention=self._attention,
            ends_only=True,
        )
        complete = [row for row, chunk in enumerate(chunks) if self._scheduler.note_computed(chunk)]
        if complete:
            requests = [chunks[row].request for row in complete]
            logits = self._model.logits(hidden[complete], self._cache)
            self._record_all(requests, drawn(logits, requests))

    def _decode(self) -> None:
        # Another prefill is due: a single step, so that the others do not wait for it longer than before.
        max_steps = 1 if self._scheduler.prefilling else _MAX_STEPS
        max_steps = self._scheduler.make_room(max_steps)
        requests = list(self._scheduler.running)
        drawn = decode(
            self._model,
            self._cache,
            requests,
            attention=self._attention,
            max_steps=max_steps,
            interrupt=self._interrupt,
        )
        for request, token_ids in zip(requests, drawn.tokens.T.tolist(), strict=True):
            self._scheduler.seats.write(request.used_seat(), [request.last_token, *token_ids[:-1]])
        self._record_all(requests, drawn)

    def _record_all(self, requests: list[Request], drawn: Drawn) -> None:
        self._counters.sampled += drawn.tokens.numel()
        all_tokens, all_logprobs = drawn.tokens.T.tolist(), drawn.logprobs.T.tolist()
        for index, request in enumerate(requests):
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
                    f"policy version {self._version}"
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
        request.unsent_version = self._version
        request.note(token_ids, logprobs, kept_ids, raw_logprobs)
        ending = request.ending()
        if ending is not None:
            self._finish(request, ending)
        elif len(request.unsent_ids) >= request.sampling.stream_interval_tokens > 0:
            self._send(request, None)

    def _finish(self, request: Request, ending: FinishReason | EngineError) -> None:
        # Rows behind logits that are not finite may be at fault themselves.
        self._scheduler.finish(request, is_sound=not isinstance(ending, EngineError))
        self._send(request, ending)

    def _send(self, request: Request, ending: FinishReason | EngineError | None) -> None:
        """Hand over what was sampled since the last piece; called from the worker and the event loop."""
        if request.unsent_ids or isinstance(ending, str):
            reason = ending if isinstance(ending, str) else None
            self._deliver(request, request.piece(request.unsent_version, reason))
        if isinstance(ending, EngineError):
            self._deliver(request, ending)

    def _deliver(self, request: Request, item: SampledTokens | EngineError) -> None:
        loop = self._driver.get_loop() if self._driver is not None else None
        if loop is not None:
            loop.call_soon_threadsafe(request.pieces.put_nowait, item)
