"""Fakes that several test folders share. They satisfy ports; they patch nothing."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from longarc.errors import EngineError
from longarc.records.sampling import (
    EngineHealth,
    FinishReason,
    SampledTokens,
    Sampling,
    WeightSource,
)


@dataclass
class EngineRequest:
    """What a fake engine was asked."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    session_id: str


@dataclass
class FakeEngine:
    """Answers with scripted ids, ``piece_tokens`` at a time; cut to the budget with finish reason length.

    The log-probability of the n-th token of a completion is -(n + 1) / 8. ``version_of_piece`` gives the
    policy version by (request index, piece index); by default it is ``policy_version`` at that moment.
    """

    completions: Iterable[Sequence[int]]
    piece_tokens: int = 2
    policy_version: int = 0
    version_of_piece: Callable[[int, int], int] | None = None
    before_piece: Callable[[int, int], None] | None = None
    """Called with (request index, piece index) before each piece; may raise."""
    requests: list[EngineRequest] = field(default_factory=list)
    num_cancelled: int = 0

    def __post_init__(self) -> None:
        self._script = iter(self.completions)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        request = len(self.requests)
        self.requests.append(EngineRequest(tuple(prompt_ids), sampling, session_id))
        try:
            ids = tuple(next(self._script))
        except StopIteration:
            raise EngineError(f"the fake engine has no completion for request {request}") from None
        is_cut = len(ids) > sampling.max_new_tokens
        ids = ids[: sampling.max_new_tokens]
        finish: FinishReason = "length" if is_cut or ids[-1] not in sampling.stop_ids else "stop"
        is_done = False
        try:
            for piece, start in enumerate(range(0, len(ids), self.piece_tokens)):
                if self.before_piece is not None:
                    self.before_piece(request, piece)
                part = ids[start : start + self.piece_tokens]
                is_done = start + len(part) == len(ids)
                yield SampledTokens(
                    token_ids=part,
                    logprobs=tuple(-(start + i + 1) / 8 for i in range(len(part))),
                    policy_version=(
                        self.version_of_piece(request, piece)
                        if self.version_of_piece
                        else self.policy_version
                    ),
                    finish_reason=finish if is_done else None,
                )
        finally:
            self.num_cancelled += not is_done

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        return [0.0] + [-1.0 / temperature] * (len(token_ids) - 1)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        self.policy_version = policy_version

    async def health(self) -> EngineHealth:
        return EngineHealth(
            is_ready=True,
            policy_version=self.policy_version,
            num_running=0,
            num_waiting=0,
            num_sampled_tokens=0,
            num_prompt_tokens=sum(len(r.prompt_ids) for r in self.requests),
            num_cached_tokens=0,
        )
