"""The engine port over a server of somebody else's: what vLLM and SGLang have in common.

::

    stream() --> checks --> gate (closed during an update) --> server --chunks--> pieces, one weight version each
                                  ^ update_weights: digest, close, hand over, open

Which weights sampled a token is what the server says when a completion ends: spans of versions over its
tokens. Until then a piece is handed over only where no update has begun since the request was sent, because
tokens of before and after an update look alike on their way here.

A request is in flight from the moment it is sent. Later ones carry another cache salt after an update, so
that nothing the old weights computed serves them, whatever the server's own cache does.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from longarc.engine.pieces import Chunk, Completion
from longarc.errors import EngineError, EngineRequestError
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

_UNDERSTOOD = frozenset(
    (
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop_ids",
        "stop_strings",
        "returns_kept_ids",
        "returns_raw_logprobs",
        "stream_interval_tokens",
        "seed",
    )
)
"""Fields of `Sampling` that servers are asked for, or that `EngineServer.refusal` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """One completion as a server is asked for it."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    request_id: str
    cache_salt: str
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """What a server says of itself."""

    num_running: int = 0
    num_waiting: int = 0
    num_sampled_tokens: int = 0
    """Since it started."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class BrokenServerError(EngineError):
    """A server's weights are neither the old ones nor the new ones: nothing it says means anything any more."""


class EngineServer(Protocol):
    """A server in the words of its own protocol."""

    name: str

    def refusal(self, sampling: Sampling) -> str | None:
        """Say why it cannot sample like this with the log-probabilities that LongArc needs; None where it can."""
        ...

    def chunks(self, request: ServerRequest) -> AsyncGenerator[Chunk]:
        """Sample one completion; the last chunk has its ending."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats] at temperature 1 for i >= 1, preceded by 0.0."""
        ...

    async def update(self, path: str, *, policy_version: int) -> None:
        """Put a weight file in use; what it raises leaves the old weights in use, unless the server is broken.

        Raises:
            EngineError: the weights were refused.
            BrokenServerError: the server has neither the new nor the old weights.
        """
        ...

    async def counts(self) -> ServerCounts:
        """Return its counters.

        Raises:
            EngineError: it does not answer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLimits:
    """What a request may ask for."""

    vocab_size: int
    max_context_tokens: int
    max_requests: int
    """In flight at one time, those that wait for an update included [requests]."""
    update_timeout_s: float


@dataclass(slots=True)
class _Busy:
    """Time with a request in flight."""

    clock: Callable[[], float]
    num_requests: int = 0
    total_s: float = 0.0
    since_s: float = field(default=0.0)

    def add(self, change: int) -> None:
        now = self.clock()
        if self.num_requests:
            self.total_s += now - self.since_s
        self.since_s = now
        self.num_requests += change


class ServedEngine:
    """Satisfies the `Engine` port through a server that is up."""

    def __init__(
        self,
        server: EngineServer,
        limits: ServedLimits,
        *,
        policy_version: int,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.server = server
        self._limits = limits
        self._version = policy_version
        self._seed = seed
        self._busy = _Busy(clock)
        self._gate = asyncio.Event()
        self._gate.set()
        self._update = asyncio.Lock()
        self._num_updates = 0
        self._num_requests = 0
        self._counts = ServerCounts()
        self._failure: EngineError | None = None

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Sample one completion; see `longarc.records.ports.Engine`."""
        self._check(prompt_ids, sampling)
        self._num_requests += 1
        number = self._num_requests
        self._busy.add(1)
        try:
            await self._gate.wait()
            if self._failure is not None:
                raise self._failure
            num_updates = self._num_updates
            request = ServerRequest(
                prompt_ids=prompt_ids,
                sampling=sampling,
                seed=self._seed_of(sampling, number),
                request_id=f"longarc-{self._seed}-{number}",
                cache_salt=f"v{self._version}-{num_updates}",
                session_id=session_id,
            )
            completion = Completion(sampling, version=self._version)
            async with contextlib.aclosing(self.server.chunks(request)) as chunks:
                async for chunk in chunks:
                    is_settled = num_updates == self._num_updates
                    for piece in completion.add(chunk, is_settled=is_settled):
                        yield piece
            if not completion.is_over:
                raise EngineError(
                    f"{self.server.name} ended request {request.request_id} without a finish reason"
                )
        finally:
            self._busy.add(-1)

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats]; 0.0 for the first token.

        Raises:
            EngineRequestError: the tokens do not fit, or ``temperature`` is not 1: servers score prompts at 1 only.
        """
        if temperature != 1.0:
            raise EngineRequestError(
                f"{self.server.name} scores prompts at temperature 1 only, asked was {temperature}; "
                f"score with the trainer's model instead"
            )
        if not token_ids:
            raise EngineRequestError(
                "there is nothing to score: token_ids is empty; send at least one"
            )
        if len(token_ids) >= self._limits.max_context_tokens:
            raise EngineRequestError(
                f"cannot score {len(token_ids)} tokens: {self.server.name} samples one more, and "
                f"max_context_tokens={self._limits.max_context_tokens}"
            )
        self._check_ids(token_ids)
        await self._gate.wait()
        return await self.server.score(token_ids)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Put new weights in use; on an error the old ones are, unless the error says that the server is broken."""
        if self._failure is not None:
            raise self._failure
        async with self._update:
            found = await asyncio.to_thread(_digest, source.path)
            if found != source.sha256:
                raise EngineError(
                    f"weights {policy_version} were not loaded: {source.path} has digest {found[:12]}, "
                    f"announced was {source.sha256[:12]}; publish again"
                )
            self._gate.clear()
            self._num_updates += 1
            try:
                async with asyncio.timeout(self._limits.update_timeout_s):
                    await self.server.update(source.path, policy_version=policy_version)
            except TimeoutError:
                self._failure = BrokenServerError(
                    f"{self.server.name} took more than engine.update_timeout_s="
                    f"{self._limits.update_timeout_s:g} for weights {policy_version}: which it uses is unknown"
                )
                raise self._failure from None
            except BrokenServerError as error:
                self._failure = error
                raise
            finally:
                self._gate.set()
            self._version = policy_version

    async def health(self) -> EngineHealth:
        """Say what the server is doing; its last counters where it does not answer."""
        is_ready = self._failure is None
        try:
            self._counts = await self.server.counts()
        except EngineError:
            is_ready = False
        counts = self._counts
        self._busy.add(0)
        return EngineHealth(
            is_ready=is_ready,
            policy_version=self._version,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_sampled_tokens=counts.num_sampled_tokens,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            busy_s=self._busy.total_s,
        )

    def _seed_of(self, sampling: Sampling, number: int) -> int:
        seed = sampling.seed if sampling.seed is not None else self._seed * 1_000_003 + number
        return seed % 2**63

    def _refuse_unknown(self, sampling: Sampling) -> None:
        """Refuse what somebody taught requests and not this client: nothing is left out in silence."""
        if sampling.constraint is not None:
            raise EngineRequestError(
                f"{self.server.name} runs without a tokenizer here, and so cannot make an answer follow a JSON schema; "
                f"ask for plain text, or use LongArc's own engine"
            )
        for known in fields(sampling):
            value = getattr(sampling, known.name)
            if known.name not in _UNDERSTOOD and value != known.default:
                raise EngineRequestError(
                    f"{self.server.name} cannot honour {known.name}={value!r}; leave it out, or use the embedded engine"
                )

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if self._failure is not None:
            raise self._failure
        if not prompt_ids:
            raise EngineError("the prompt is empty; send at least one token")
        needed, longest = (
            len(prompt_ids) + sampling.max_new_tokens,
            self._limits.max_context_tokens,
        )
        if needed > longest:
            raise EngineError(
                f"prompt of {len(prompt_ids)} + max_new_tokens={sampling.max_new_tokens} is {needed} tokens, "
                f"but max_context_tokens={longest}; shorten the prompt or ask for less"
            )
        self._check_ids(prompt_ids)
        self._refuse_unknown(sampling)
        refusal = self.server.refusal(sampling)
        if refusal is not None:
            raise EngineRequestError(f"{self.server.name} {refusal}")
        if self._busy.num_requests >= self._limits.max_requests:
            raise EngineError(
                f"{self._busy.num_requests} requests are in flight already (engine.max_running + "
                f"engine.max_waiting); send fewer at once or raise engine.max_waiting"
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Refuse what has no embedding: an id beyond the vocabulary ends vLLM's engine process."""
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self._limits.vocab_size:
            raise EngineRequestError(
                f"prompt ids span {low}..{high}, but the vocabulary is 0..{self._limits.vocab_size - 1}: "
                f"the tokenizer does not match the model"
            )


def _digest(path: str) -> str:
    try:
        return file_sha256(Path(path))
    except OSError as error:
        raise EngineError(f"weights were not loaded: {path} cannot be read: {error}") from error


def finite(value: object) -> float:
    """Return a log-probability from JSON; NaN where it is none (a server's NaN is written as null)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan  # type: ignore[arg-type]
