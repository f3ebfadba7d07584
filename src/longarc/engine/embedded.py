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
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from longarc.config.engine import EngineConfig
from longarc.engine.computing import StepComputer, StepSettings
from longarc.engine.request import Request, check_scoring, checked_prompt
from longarc.engine.scheduler import Scheduler
from longarc.engine.seats import SeatTable
from longarc.engine.seeds import seed_of_request
from longarc.engine.speculation import cache_for, decoding_for
from longarc.engine.token_text import TokenText, walk_of
from longarc.engine.weights import EngineWeights, WeightStore, WeightUpdate
from longarc.errors import (
    EngineBusyError,
    EngineError,
    EngineFaultError,
    EngineLostError,
    EngineRequestError,
    LongArcError,
    boundary,
)
from longarc.models.decoder_base import Decoder
from longarc.models.fp8 import round_to_fp8
from longarc.models.kernels.steps import Interrupt
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.models.routed_rows import RoutingShape
from longarc.models.threads import set_compute_threads
from longarc.records.sampling import (
    EngineHealth,
    RoutingReplay,
    SampledTokens,
    Sampling,
    WeightSource,
)
from longarc.tokens.grammar import GrammarWalk

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Updates:
    """What weight updates have cost so far."""

    num: int = 0
    total_s: float = 0.0
    pause_s: float = 0.0
    max_pause_s: float = 0.0


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
        text: TokenText | None = None,
        records_routing: RoutingReplay = "none",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over ``model``.

        Args:
            model: is only read, but for new weights and for their rounding.
            config: see the fields.
            max_context_tokens: longest prompt and completion together [tokens].
            policy_version: version [optimizer steps] of the weights.
            attention: how the model was trained to attend.
            seed: of the completions that bring none.
            text: of tokens; without it stop strings and constraints are refused.
            records_routing: what of the routing of every token is kept beside its rows, for requests that ask.
            clock: monotonic [seconds].

        Raises:
            ConfigError: the cache is too small for one sequence of the longest context, drafts are asked for that
                the model cannot make, or routing is to be recorded that it does not have.
        """
        routing = RoutingShape.of(model.config, records_routing, attention=attention)
        self._text = text
        model.eval().requires_grad_(False)
        alter = round_to_fp8 if config.weight_quantisation == "fp8" else None
        if alter is not None:
            alter(model)
        self._vocab_size = model.config.vocab_size
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._updates = _Updates()
        self._attention: Literal["dense", "sparse"] = attention
        self._seed = seed
        self._clock = clock
        cache = cache_for(model, config, max_context_tokens=max_context_tokens)
        if routing is not None:
            cache.keep_routing(routing)
        self._records_routing = routing is not None
        self._decoding = decoding_for(config, attention=attention)
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=self._set_threads
        )
        self._weights = WeightStore(
            EngineWeights(model, cache, policy_version),
            settle=self._settle,
            on_loaded=partial(self._call_soon, self._notify),
            alter=alter,
        )
        # Its queue is bounded by config.max_waiting.
        self._scheduler = Scheduler(
            SeatTable(cache, salt=self._salt()),
            max_running=config.max_running,
            keeps_newest_token=self._decoding.keeps_newest_token,
        )
        self._wake = asyncio.Event()
        self._interrupt = Interrupt()
        self._computer = StepComputer(
            self._scheduler,
            StepSettings(
                attention=attention,
                max_prefill_tokens=config.max_prefill_tokens,
                interrupt=self._interrupt,
                decoding=self._decoding,
            ),
            deliver=self._deliver,
        )
        self._driver: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where pieces are waited for."""
        self._failure: EngineError | None = None
        self._has_failed = asyncio.Event()
        self._num_requests = 0
        self._busy_s = 0.0
        self._instance_id = secrets.token_hex(8)

    def _set_threads(self) -> None:
        set_compute_threads(self._config.num_threads)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
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
        try:
            await _to_the_end(asyncio.to_thread(self._stop_threads))
        finally:
            self._fail_all(self._failure)
            # Weights and cache go now and not when the garbage collector comes by: they can be gigabytes, and another
            # engine may follow.
            self._weights.close()
            with contextlib.suppress(AttributeError):  # closed before
                self._scheduler.seats.close()

    def _stop_threads(self) -> None:
        """Wait for the weights that are being loaded, then for the step that is being computed."""
        self._weights.stop()
        self._pool.shutdown(wait=True)

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
        walk = await walk_of(self._text, prompt_ids, sampling)
        request = self._accept(prompt_ids, sampling, session_id, walk)
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
        """Return log p(token[i] | token[:i]) [nats]; 0.0 for the first token.

        Raises:
            EngineRequestError: the tokens or the temperature are none that can be scored.
            EngineFaultError: a log-probability is not finite, or cannot be computed.
            EngineLostError: the engine failed or was closed.
        """
        if self._failure is not None:
            raise self._failure
        check_scoring(
            token_ids,
            temperature,
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._vocab_size,
        )
        loop = asyncio.get_running_loop()
        self._interrupt.set()
        # The model in use now, however many updates come before its turn.
        model = self._weights.current.model
        with _computing(f"scoring {len(token_ids)} tokens"):
            logprobs = await loop.run_in_executor(
                self._pool, self._score, model, list(token_ids), temperature
            )
        unsound = next((i for i, value in enumerate(logprobs) if not math.isfinite(value)), None)
        if unsound is not None:
            raise EngineFaultError(
                f"the log-probability of token {unsound} of the {len(token_ids)} to score is {logprobs[unsound]}: the "
                f"model makes numbers that are not finite of them; publish weights that are sound"
            )
        return logprobs

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Read weights while decoding goes on, and swap them between two decode steps.

        Returns when they are in use. As long as sequences end with weights of before (``Sampling.on_update`` says
        which), the next ones wait.

        Raises:
            WeightsRefusedError: they are not what was announced, or not this model's; the old ones stay in use.
        """
        if self._failure is not None:
            raise self._failure
        done = self._weights.ask(source, policy_version=policy_version, now_s=self._clock())
        self._notify()
        await done

    async def health(self) -> EngineHealth:
        """Say what the engine is doing."""
        scheduler, seats = self._scheduler, self._scheduler.seats
        return EngineHealth(
            is_ready=self._failure is None and self._driver is not None,
            policy_version=self._weights.policy_version,
            num_running=scheduler.num_active,
            num_waiting=scheduler.num_waiting,
            num_sampled_tokens=self._computer.num_sampled,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_free_pages=seats.pages.num_free,
            num_cached_pages=seats.pages.num_cached + seats.num_kept,
            num_used_pages=seats.pages.num_used - seats.num_kept,
            num_updates=self._updates.num,
            update_s=self._updates.total_s,
            update_pause_s=self._updates.pause_s,
            max_update_pause_s=self._updates.max_pause_s,
            busy_s=self._busy_s,
            instance_id=self._instance_id,
            num_drafted=tuple(self._decoding.num_drafted),
            num_accepted=tuple(self._decoding.num_accepted),
        )

    # Planning: only ever on the event loop --------------------------------------------------

    def _notify(self) -> None:
        """Something is to be planned: end the wait, or the steps being computed."""
        self._wake.set()
        self._interrupt.set()

    def _accept(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session_id: str,
        walk: GrammarWalk | None,
    ) -> Request:
        if self._failure is not None:
            raise self._failure
        if self._driver is None:
            raise EngineLostError("the engine is not running; enter it with `async with` first")
        if sampling.returns_routing_from is not None and not self._records_routing:
            raise EngineRequestError(
                f"returns_routing_from={sampling.returns_routing_from}: this engine does not record what tokens are "
                f"routed to; open it with records_routing, or leave this out"
            )
        prompt = checked_prompt(
            prompt_ids,
            sampling,
            max_context_tokens=self._max_context_tokens,
            vocab_size=self._vocab_size,
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
            walk=walk,
        )
        if sampling.stop_strings and self._text is not None:
            request.watch_for_stop_strings(self._text.token_bytes)
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
        with _computing("the engine failed"):
            await loop.run_in_executor(self._pool, self._step, self._weights.current)

    async def _one_step(self, loop: asyncio.AbstractEventLoop) -> None:
        self._interrupt.clear()
        self._scheduler.drop_cancelled()
        self._update_weights()
        self._scheduler.admit()
        if self._scheduler.num_active:
            await self._computed(loop)
            # Lets the consumers of finished requests run before the next step is planned.
            await asyncio.sleep(0)
            return
        self._wake.clear()
        if not self._scheduler.num_waiting and not self._weights.is_due:
            await self._wake.wait()

    def _update_weights(self) -> None:
        """Swap weights that are loaded, let go of those that nobody computes with, and have the next ones loaded."""
        taken = self._weights.take()
        if taken is not None:
            self._swap(*taken)
        held = self._weights.held
        if held is not None and all(r.weights is not held for r in self._scheduler.begun()):
            self._weights.give_back(held)
        self._weights.begin()

    def _swap(self, update: WeightUpdate, before: EngineWeights) -> None:
        """Compute with other weights from now on, but for the sequences that end with those of before."""
        started_s = self._clock()
        self._updates.num += 1
        self._scheduler.seats.renew(self._salt())
        begun = self._scheduler.begun()
        for request in begun:
            if request.sampling.on_update == "finish":
                request.weights = before
                continue
            self._computer.send(request, None)
            if request.sampling.on_update == "recompute" and request.seat is not None:
                self._scheduler.restart(request, is_sound=False)
        if any(request.weights is before for request in begun):
            self._weights.hold(before)
        else:
            self._weights.give_back(before)
        ended_s = self._clock()
        pause_s, total_s = ended_s - started_s if begun else 0.0, ended_s - update.asked_s
        self._updates.total_s += total_s
        self._updates.pause_s += pause_s
        self._updates.max_pause_s = max(self._updates.max_pause_s, pause_s)
        _log.info(
            "weights %d are in use %.3f s after they were announced; %d sequences paused for %.1f ms",
            *(update.policy_version, total_s, len(begun), 1000 * pause_s),
        )
        if not update.done.done():
            update.done.set_result(None)

    def _settle(self) -> None:
        """Wait until nothing computes that began before; called from another thread."""
        self._pool.submit(lambda: None).result()

    def _salt(self) -> str:
        """Name the weights; versions may come twice, after a resume for example."""
        return f"{self._updates.num}:{self._weights.policy_version}"

    def _fail_all(self, error: EngineError, *, fault: EngineError | None = None) -> None:
        """End all requests with ``error``; those of the step that failed with ``fault`` where there is one."""
        computed = {id(r) for r in (*self._scheduler.prefilling, *self._scheduler.running)}
        for request in self._scheduler.clear():
            request.pieces.put_nowait(fault if fault and id(request) in computed else error)
        self._weights.fail_all(error)

    # Arithmetic: only ever in the worker thread, while the event loop leaves the state alone ------

    @torch.inference_mode()
    def _score(self, model: Decoder, token_ids: list[int], temperature: float) -> list[float]:
        ids = torch.tensor(token_ids)
        output = model(ids, Layout.documents([len(token_ids)]), attention=self._attention)
        logprobs, _ = token_logprobs(
            output.hidden[:-1],
            model.output_weight,
            ids[1:],
            temperature=temperature,
            compute_dtype=model.compute_dtype,
        )
        return [0.0, *logprobs.tolist()]

    def _step(self, current: EngineWeights) -> None:
        started = self._clock()
        self._computer.step(current)
        self._busy_s += self._clock() - started

    def _deliver(self, request: Request, item: SampledTokens | EngineError) -> None:
        self._call_soon(request.pieces.put_nowait, item)

    def _call_soon(self, work: Callable[..., object], *args: object) -> None:
        """Let the event loop do something; called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(work, *args)


@contextlib.contextmanager
def _computing(doing: str) -> Iterator[None]:
    """Turn what a computation raises into a fault of what was computed, or of the machine where that lacks something."""
    try:
        with boundary(EngineFaultError, doing):
            yield
    except EngineFaultError as error:
        if isinstance(error.__cause__, MemoryError | OSError):
            raise EngineLostError(str(error)) from error.__cause__
        raise


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait until ``work`` is done even where the caller is cancelled meanwhile, who is told so afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
