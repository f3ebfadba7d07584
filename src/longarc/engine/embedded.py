"""The embedded engine: continuous batching over the model's own incremental forward.

::

    stream() --request--> waiting (bounded) --admit--> prefilling --> running --token--> request.pieces
                             ^ pushes back              | chunks       | one token each per decode step
                             |                          +------+-------+
                             +--- slot freed <--- finished, cancelled or faulty

One asyncio task (``_drive``) plans every step and touches all state; the arithmetic of a step runs in one
worker thread, so the event loop stays free and no lock is needed. Weights are swapped between two steps.
``_drive`` consumes ``_waiting``, produces pieces, waits for ``_wake``, and is unblocked by ``stream`` and
``update_weights``.
"""

import asyncio
import contextlib
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
from longarc.engine.request import Request
from longarc.engine.slots import Slot, SlotTable
from longarc.engine.stop_strings import StopStrings, TokenBytes
from longarc.errors import ContractError, EngineError, EngineFaultError, LongArcError, boundary
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

_MIN_SHARED_TOKENS = 16
"""A request waits for another one's prefill only if it saves at least this many tokens."""
_MAX_STEPS = 16
"""Decode steps in one call; who wants a turn interrupts it, so this only bounds how old `health` can be."""


@dataclass(slots=True)
class _Counters:
    sampled: int = 0
    prompt: int = 0
    cached: int = 0
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
        """
        self._token_bytes = token_bytes
        self._model = model.eval().requires_grad_(False)
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._version = policy_version
        self._attention: Literal["dense", "sparse"] = attention
        self._seed = seed
        self._clock = clock
        self._slots = SlotTable(config.num_slots, max_context_tokens)
        self._cache = model.new_cache(config.num_slots, max_context_tokens)
        self._waiting: deque[Request] = deque()  # bounded by config.max_waiting
        self._prefilling: list[Request] = []
        self._running: list[Request] = []
        self._pending_weights: deque[tuple[WeightSource, int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self._interrupt = Interrupt()
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=self._set_threads
        )
        self._driver: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._num_requests = 0
        self._counters = _Counters()

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
        self._failure = self._failure or EngineError("the engine was closed")
        if self._driver is not None:
            self._driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._driver
            self._driver = None
        self._fail_all(self._failure)
        self._pool.shutdown(wait=True)
        # Now and not when the garbage collector comes by: it can be gigabytes, and another engine may follow.
        with contextlib.suppress(AttributeError):  # closed before
            del self._cache

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
        if len(token_ids) > self._max_context_tokens:
            raise EngineError(
                f"cannot score {len(token_ids)} tokens: max_context_tokens={self._max_context_tokens}"
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
        return EngineHealth(
            is_ready=self._failure is None and self._driver is not None,
            policy_version=self._version,
            num_running=len(self._running) + len(self._prefilling),
            num_waiting=len(self._waiting),
            num_sampled_tokens=self._counters.sampled,
            num_prompt_tokens=self._counters.prompt,
            num_cached_tokens=self._counters.cached,
            busy_s=self._counters.busy_s,
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
            raise EngineError("the engine is not running; enter it with `async with` first")
        if not prompt_ids:
            raise EngineError("the prompt is empty; send at least one token")
        if sampling.stop_strings and self._token_bytes is None:
            raise EngineError(
                f"stop_strings={list(sampling.stop_strings)} need the text of tokens, which this engine was not "
                f"given; send stop_ids, or open the engine with token_bytes"
            )
        needed = len(prompt_ids) + sampling.max_new_tokens
        if needed > self._max_context_tokens:
            raise EngineError(
                f"prompt of {len(prompt_ids)} + max_new_tokens={sampling.max_new_tokens} is {needed} tokens, "
                f"but max_context_tokens={self._max_context_tokens}; shorten the prompt or ask for less"
            )
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        vocab_size = self._model.config.vocab_size
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            raise EngineError(
                f"prompt ids span {int(prompt.min())}..{int(prompt.max())}, but the vocabulary is 0..{vocab_size - 1}: "
                f"the tokenizer does not match the model"
            )
        if len(self._waiting) >= self._config.max_waiting:
            raise EngineError(
                f"{len(self._waiting)} requests wait already (max_waiting={self._config.max_waiting}); "
                f"send fewer at once or raise engine.max_waiting"
            )
        self._num_requests += 1
        seed = (
            sampling.seed
            if sampling.seed is not None
            else self._seed * 1_000_003 + self._num_requests
        )
        request = Request(prompt=prompt, sampling=sampling, session_id=session_id, seed=seed)
        if sampling.stop_strings and self._token_bytes is not None:
            request.stop_strings = StopStrings(sampling.stop_strings, self._token_bytes)
        self._waiting.append(request)
        self._notify()
        return request

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with boundary(EngineError, "the engine failed"):
                while True:
                    await self._one_step(loop)
        except LongArcError as error:
            # Ends every request with the reason; later requests are refused with it too.
            self._failure = error if isinstance(error, EngineError) else EngineError(str(error))
            self._fail_all(self._failure)

    async def _one_step(self, loop: asyncio.AbstractEventLoop) -> None:
        self._interrupt.clear()
        await self._apply_weights(loop)
        self._drop_cancelled()
        self._admit()
        if self._prefilling or self._running:
            await loop.run_in_executor(self._pool, self._compute)
            # Lets the consumers of finished requests run before the next step is planned.
            await asyncio.sleep(0)
            return
        self._wake.clear()
        if not self._waiting and not self._pending_weights:
            await self._wake.wait()

    async def _apply_weights(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._pending_weights:
            source, version, done = self._pending_weights.popleft()
            try:
                await loop.run_in_executor(self._pool, self._load, source)
            except (ContractError, OSError) as error:
                done.set_exception(EngineError(f"weights {version} were not loaded: {error}"))
                continue
            for request in (*self._prefilling, *self._running):
                self._send(request, None)
            self._version = version
            self._slots.invalidate()
            if not done.cancelled():
                done.set_result(None)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(r for r in self._waiting if not r.is_cancelled)
        for group in (self._prefilling, self._running):
            for request in [r for r in group if r.is_cancelled]:
                group.remove(request)
                self._free(request)

    def _admit(self) -> None:
        """Give slots to waiting requests, oldest first, sharing what is cached or being computed."""
        kept: deque[Request] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            if len(self._running) + len(self._prefilling) >= self._config.max_running:
                kept.append(request)
                break
            donor, length = self._slots.donor(request.prompt, request.session_id)
            if donor is not None:
                length = self._cache.reusable(donor.index, length)
            if self._waits_for_prefill(request, length):
                kept.append(request)
                continue
            slot = self._slots.acquire(request.session_id, donor)
            if slot is None:
                kept.append(request)
                break
            self._start(request, slot, donor, length)
        kept.extend(self._waiting)
        self._waiting = kept

    def _waits_for_prefill(self, request: Request, num_cached: int) -> bool:
        needed = num_cached + _MIN_SHARED_TOKENS
        if needed > len(request.prompt) - 1:
            return False
        head = request.prompt[:needed]
        return any(
            other.slot is not None
            and not other.slot.is_stale
            and len(other.prompt) >= needed
            # Looked at first, because most prompts differ there.
            and other.prompt[needed - 1] == head[-1]
            and np.array_equal(other.prompt[:needed], head)
            for other in self._prefilling
        )

    def _start(self, request: Request, slot: Slot, donor: Slot | None, length: int) -> None:
        if donor is not None and donor is not slot and length:
            self._cache.copy_prefix(donor.index, slot.index, length)
        slot.length = 0
        slot.is_stale = False
        slot.append(request.prompt[:length])
        request.slot = slot
        request.num_cached = length
        self._counters.prompt += len(request.prompt)
        self._counters.cached += length
        self._prefilling.append(request)

    def _free(self, request: Request) -> None:
        if request.slot is not None:
            self._slots.release(request.slot)
            request.slot = None

    def _fail_all(self, error: EngineError) -> None:
        for request in (*self._waiting, *self._prefilling, *self._running):
            request.pieces.put_nowait(error)
            self._free(request)
        self._waiting.clear()
        self._prefilling.clear()
        self._running.clear()
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
            output.hidden[:-1], self._model.output_weight, ids[1:], temperature=temperature
        )
        return [0.0, *logprobs.tolist()]

    def _load(self, source: WeightSource) -> None:
        found = file_sha256(Path(source.path))
        if found != source.sha256:
            raise ContractError(
                f"{source.path} has digest {found[:12]}, announced was {source.sha256[:12]}; publish again"
            )
        load_weights(self._model, source.path)

    @torch.inference_mode()
    def _compute(self) -> None:
        started = self._clock()
        if self._prefilling:
            self._prefill()
        if self._running:
            self._decode()
        self._counters.busy_s += self._clock() - started

    def _prefill(self) -> None:
        budget = self._config.max_prefill_tokens
        chosen: list[tuple[Request, Slot, int]] = []
        for request in self._prefilling:
            if budget <= 0:
                break
            slot = request.used_slot()
            count = min(budget, request.num_missing)
            chosen.append((request, slot, count))
            budget -= count
        hidden = self._model.extend(
            torch.from_numpy(
                np.concatenate([r.prompt[s.length : s.length + n] for r, s, n in chosen])
            ),
            [s.index for _, s, _ in chosen],
            [s.length for _, s, _ in chosen],
            [n for _, _, n in chosen],
            self._cache,
            attention=self._attention,
            ends_only=True,
        )
        complete: list[tuple[Request, int]] = []
        for row, (request, slot, count) in enumerate(chosen):
            slot.append(request.prompt[slot.length : slot.length + count])
            if request.num_missing == 0:
                complete.append((request, row))
        if complete:
            requests = [request for request, _ in complete]
            self._prefilling = [r for r in self._prefilling if r not in requests]
            self._running.extend(requests)
            self._sample(requests, hidden[[row for _, row in complete]])

    def _decode(self) -> None:
        requests = list(self._running)
        # Another prefill is due: a single step, so that the others do not wait for it longer than before.
        max_steps = 1 if self._prefilling else _MAX_STEPS
        drawn = decode(
            self._model,
            self._cache,
            requests,
            attention=self._attention,
            max_steps=max_steps,
            interrupt=self._interrupt,
        )
        for request, token_ids in zip(requests, drawn.tokens.T.tolist(), strict=True):
            request.used_slot().append([request.last_token, *token_ids[:-1]])
        self._record_all(requests, drawn)

    def _sample(self, requests: list[Request], hidden: torch.Tensor) -> None:
        self._record_all(requests, drawn(self._model.logits(hidden, self._cache), requests))

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
        self._running.remove(request)
        self._send(request, ending)
        self._free(request)

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
