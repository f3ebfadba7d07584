"""From a server's chunks to the pieces of a completion, each sampled by one weight version."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from longarc.errors import EngineError, EngineFaultError
from longarc.records.sampling import FinishReason, SampledTokens, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Weights that sampled tokens ``start`` to ``end`` of a completion."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a completion ended."""

    finish_reason: FinishReason
    spans: Sequence[VersionSpan] | None
    """Over all its tokens; None where the server does not say."""
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some tokens of a completion on their way from a server."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """log-probability [nats] of each under the distribution it was sampled from; NaN where the server has none."""
    kept_ids: Sequence[tuple[int, ...]] = ()
    """Ids each was drawn from, ascending; empty where nobody asked."""
    ending: Ending | None = None


@dataclass(slots=True)
class Completion:
    """Collects chunks and hands over pieces."""

    sampling: Sampling
    version: int
    """In use when the request was sent."""
    is_over: bool = False
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _kept: list[tuple[int, ...]] = field(default_factory=list)
    _num_sent: int = 0

    def add(self, chunk: Chunk, *, is_settled: bool) -> Iterator[SampledTokens]:
        """Take a chunk; yield what can be handed over.

        Args:
            chunk: the next one.
            is_settled: whether no update has begun since the request was sent, so that ``version`` sampled
                all that is there.

        Raises:
            EngineFaultError: a log-probability is not a number.
            EngineError: the server contradicts itself about lengths or versions.
        """
        self._take(chunk)
        if chunk.ending is not None:
            yield from self._rest(chunk.ending, is_settled=is_settled)
            return
        interval = self.sampling.stream_interval_tokens
        if interval and is_settled and len(self._ids) - self._num_sent >= interval:
            yield self._piece(len(self._ids), self.version)

    def _take(self, chunk: Chunk) -> None:
        num_tokens = len(chunk.token_ids)
        if len(chunk.logprobs) != num_tokens:
            raise EngineError(
                f"the server sent {num_tokens} tokens with {len(chunk.logprobs)} log-probabilities"
            )
        asks_kept = self.sampling.returns_kept_ids
        if asks_kept and self.sampling.is_truncated and len(chunk.kept_ids) != num_tokens:
            raise EngineError(
                f"the server sent {num_tokens} truncated tokens with the ids that were kept of "
                f"{len(chunk.kept_ids)}: the trainer could not score under the same distribution. Start the "
                f"server so that it returns them, or sample without top_p, top_k and min_p"
            )
        is_greedy = self.sampling.temperature == 0
        for position, logprob in enumerate(chunk.logprobs, start=len(self._ids)):
            if not math.isfinite(logprob):
                raise EngineFaultError(
                    f"the log-probability of sampled token {position} is not a finite number: the server's "
                    f"logits are broken"
                )
        self._ids += chunk.token_ids
        self._logprobs += [0.0] * num_tokens if is_greedy else chunk.logprobs
        if asks_kept:
            self._kept += chunk.kept_ids if self.sampling.is_truncated else [()] * num_tokens

    def _rest(self, ending: Ending, *, is_settled: bool) -> Iterator[SampledTokens]:
        spans = ending.spans
        if spans is None:
            if not is_settled:
                raise EngineError(
                    "weights changed while a completion ran and the server does not say which of them sampled "
                    'its tokens; set engine.on_update = "finish", or use a newer server'
                )
            spans = [VersionSpan(version=self.version, start=0, end=len(self._ids))]
        self._check_spans(spans)
        last = len(spans) - 1
        for index, span in enumerate(spans):
            if span.end > self._num_sent or index == last:
                cached = 0 if self._num_sent else ending.num_cached_tokens
                reason = ending.finish_reason if index == last else None
                yield self._piece(span.end, span.version, reason, num_cached_tokens=cached)
        self.is_over = True

    def _check_spans(self, spans: Sequence[VersionSpan]) -> None:
        edges = [0, *(span.end for span in spans)]
        is_whole = edges[-1] == len(self._ids) and all(
            span.start == before for span, before in zip(spans, edges, strict=False)
        )
        is_as_sent = all(
            span.version == self.version for span in spans if span.start < self._num_sent
        )
        if not (is_whole and is_as_sent):
            raise EngineError(
                f"the server says that weights {[(s.version, s.start, s.end) for s in spans]} sampled the "
                f"{len(self._ids)} tokens of a completion, of which {self._num_sent} were handed over as of "
                f"version {self.version}: these do not fit"
            )

    def _piece(
        self,
        end: int,
        version: int,
        finish_reason: FinishReason | None = None,
        *,
        num_cached_tokens: int = 0,
    ) -> SampledTokens:
        start, self._num_sent = self._num_sent, end
        logprobs = tuple(self._logprobs[start:end])
        return SampledTokens(
            token_ids=tuple(self._ids[start:end]),
            logprobs=logprobs,
            policy_version=version,
            finish_reason=finish_reason,
            num_cached_tokens=num_cached_tokens,
            kept_ids=tuple(self._kept[start:end]),
            # Asked for only where both distributions are the same one (see `raw_logprobs_are_free`).
            raw_logprobs=logprobs if self.sampling.returns_raw_logprobs else (),
        )


def raw_logprobs_are_free(sampling: Sampling) -> bool:
    """Whether the distribution sampled from is the raw one, so that its log-probabilities are there anyway."""
    return sampling.temperature == 1.0 and not sampling.is_truncated
