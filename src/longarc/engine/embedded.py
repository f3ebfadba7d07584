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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch

from longarc.config.engine import EngineConfig
from longarc.engine.sampler import sample
from longarc.engine.slots import Ids, Slot, SlotTable, common_prefix
from longarc.errors import ContractError, EngineError, EngineFaultError, LongArcError, boundary
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
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


@dataclass(slots=True, eq=False)
class _Request:
    """One completion on its way."""

    prompt: Ids
    sampling: Sampling
    session_id: str
    seed: int
    pieces: asyncio.Queue[SampledTokens | EngineError] = field(default_factory=asyncio.Queue)
    """Bounded by ``sampling.max_new_tokens`` pieces."""
    slot: Slot | None = None
    num_cached: int = 0
    num_sampled: int = 0
    last_token: int = -1
    unsent_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[float] = field(default_factory=list)
    unsent_version: int = 0
    has_sent: bool = False
    is_cancelled: bool = False

    @property
    def num_missing(self) -> int:
        """Prompt tokens whose state is not in the slot yet."""
        return len(self.prompt) - (self.slot.length if self.slot else 0)


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._version = policy_version
        self._attention: Literal["dense", "sparse"] = attention
        self._seed = seed
        self._clock = clock
        self._slots = SlotTable(config.num_slots, max_context_tokens)
        self._cache = model.new_cache(config.num_slots, max_context_tokens)
        self._waiting: deque[_Request] = deque()  # bounded by config.max_waiting
        self._prefilling: list[_Request] = []
        self._running: list[_Request] = []
        self._pending_weights: deque[tuple[WeightSource, int, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="engine", initializer=self._set_threads
        )
        self._driver: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._num_requests = 0
        self._counters = _Counters()

    def _set_threads(self) -> None:
        torch.set_num_threads(self._config.num_threads)

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
            self._wake.set()

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats]; 0.0 for the first token."""
        if len(token_ids) > self._max_context_tokens:
            raise EngineError(
                f"cannot score {len(token_ids)} tokens: max_context_tokens={self._max_context_tokens}"
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._score, list(token_ids), temperature)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Swap the weights between two decode steps; returns when the new ones are in use."""
        if self._failure is not None:
            raise self._failure
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending_weights.append((source, policy_version, done))
        self._wake.set()
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

    def _accept(self, prompt_ids: Sequence[int], sampling: Sampling, session_id: str) -> _Request:
        if self._failure is not None:
            raise self._failure
        if self._driver is None:
            raise EngineError("the engine is not running; enter it with `async with` first")
        if not prompt_ids:
            raise EngineError("the prompt is empty; send at least one token")
        if sampling.max_new_tokens < 1:
            raise EngineError(f"max_new_tokens={sampling.max_new_tokens} must be at least 1")
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
        request = _Request(prompt=prompt, sampling=sampling, session_id=session_id, seed=seed)
        self._waiting.append(request)
        self._wake.set()
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
        kept: deque[_Request] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            if len(self._running) + len(self._prefilling) >= self._config.max_running:
                kept.append(request)
                break
            donor, length = self._slots.donor(request.prompt, request.session_id)
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

    def _waits_for_prefill(self, request: _Request, num_cached: int) -> bool:
        for other in self._prefilling:
            if other.slot is None or other.slot.is_stale:
                continue
            shared = common_prefix(other.prompt, request.prompt[:-1])
            if shared >= num_cached + _MIN_SHARED_TOKENS:
                return True
        return False

    def _start(self, request: _Request, slot: Slot, donor: Slot | None, length: int) -> None:
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

    def _free(self, request: _Request) -> None:
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
        chosen: list[tuple[_Request, Slot, int]] = []
        for request in self._prefilling:
            if budget <= 0:
                break
            slot = _slot_of(request)
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
        )
        complete: list[tuple[_Request, int]] = []
        end = 0
        for request, slot, count in chosen:
            slot.append(request.prompt[slot.length : slot.length + count])
            end += count
            if request.num_missing == 0:
                complete.append((request, end - 1))
        if complete:
            requests = [request for request, _ in complete]
            self._prefilling = [r for r in self._prefilling if r not in requests]
            self._running.extend(requests)
            self._sample(requests, hidden[[row for _, row in complete]])

    def _decode(self) -> None:
        requests = list(self._running)
        slots = [_slot_of(request) for request in requests]
        hidden = self._model.extend(
            torch.tensor([request.last_token for request in requests]),
            [slot.index for slot in slots],
            [slot.length for slot in slots],
            [1] * len(requests),
            self._cache,
            attention=self._attention,
        )
        for request, slot in zip(requests, slots, strict=True):
            slot.append([request.last_token])
        self._sample(requests, hidden)

    def _sample(self, requests: list[_Request], hidden: torch.Tensor) -> None:
        tokens, logprobs, is_finite = sample(
            self._model.logits(hidden, self._cache),
            [request.sampling for request in requests],
            seeds=[request.seed for request in requests],
            positions=[request.num_sampled for request in requests],
        )
        self._counters.sampled += len(requests)
        for request, token, logprob, finite in zip(
            requests, tokens.tolist(), logprobs.tolist(), is_finite.tolist(), strict=True
        ):
            if finite:
                self._record(request, token, logprob)
            else:
                self._finish(
                    request,
                    EngineFaultError(
                        f"logits are not finite at token {request.num_sampled} of session {request.session_id}, "
                        f"policy version {self._version}"
                    ),
                )

    def _record(self, request: _Request, token: int, logprob: float) -> None:
        request.unsent_version = self._version
        request.unsent_ids.append(token)
        request.unsent_logprobs.append(logprob)
        request.num_sampled += 1
        request.last_token = token
        sampling = request.sampling
        if token in sampling.stop_ids:
            self._finish(request, "stop")
        elif request.num_sampled >= sampling.max_new_tokens:
            self._finish(request, "length")
        elif len(request.unsent_ids) >= sampling.stream_interval_tokens > 0:
            self._send(request, None)

    def _finish(self, request: _Request, ending: FinishReason | EngineError) -> None:
        self._running.remove(request)
        self._send(request, ending)
        self._free(request)

    def _send(self, request: _Request, ending: FinishReason | EngineError | None) -> None:
        """Hand over what was sampled since the last piece; called from the worker and the event loop."""
        if request.unsent_ids or isinstance(ending, str):
            piece = SampledTokens(
                token_ids=tuple(request.unsent_ids),
                logprobs=tuple(request.unsent_logprobs),
                policy_version=request.unsent_version,
                finish_reason=ending if isinstance(ending, str) else None,
                num_cached_tokens=0 if request.has_sent else request.num_cached,
            )
            request.has_sent = True
            request.unsent_ids, request.unsent_logprobs = [], []
            self._deliver(request, piece)
        if isinstance(ending, EngineError):
            self._deliver(request, ending)

    def _deliver(self, request: _Request, item: SampledTokens | EngineError) -> None:
        loop = self._driver.get_loop() if self._driver is not None else None
        if loop is not None:
            loop.call_soon_threadsafe(request.pieces.put_nowait, item)


def _slot_of(request: _Request) -> Slot:
    if request.slot is None:
        raise ContractError(f"request of session {request.session_id} runs without a slot")
    return request.slot
