"""One completion on its way through the engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from longarc.engine.slots import Ids, Slot
from longarc.engine.stop_strings import StopStrings
from longarc.errors import ContractError, EngineError
from longarc.records.sampling import FinishReason, SampledTokens, Sampling


@dataclass(slots=True, eq=False)
class Request:
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
    unsent_kept: list[tuple[int, ...]] = field(default_factory=list)
    unsent_raw: list[float] = field(default_factory=list)
    unsent_version: int = 0
    stop_strings: StopStrings | None = None
    has_sent: bool = False
    is_cancelled: bool = False

    def note(
        self,
        token_ids: list[int],
        logprobs: list[float],
        kept_ids: Sequence[tuple[int, ...]],
        raw_logprobs: Sequence[float],
    ) -> None:
        """Keep sampled tokens until they are handed over."""
        self.unsent_ids.extend(token_ids)
        self.unsent_logprobs.extend(logprobs)
        if self.sampling.returns_kept_ids:
            # Steps that keep the whole vocabulary do not say so.
            self.unsent_kept.extend(kept_ids or [()] * len(token_ids))
        if self.sampling.returns_raw_logprobs:
            self.unsent_raw.extend(raw_logprobs)
        self.num_sampled += len(token_ids)
        self.last_token = token_ids[-1]

    def piece(self, version: int, finish_reason: FinishReason | None) -> SampledTokens:
        """Return what is to be handed over, and forget it."""
        piece = SampledTokens(
            token_ids=tuple(self.unsent_ids),
            logprobs=tuple(self.unsent_logprobs),
            policy_version=version,
            finish_reason=finish_reason,
            num_cached_tokens=0 if self.has_sent else self.num_cached,
            kept_ids=tuple(self.unsent_kept),
            raw_logprobs=tuple(self.unsent_raw),
        )
        self.has_sent = True
        for unsent in (self.unsent_ids, self.unsent_logprobs, self.unsent_kept, self.unsent_raw):
            unsent.clear()
        return piece

    def ending(self) -> FinishReason | None:
        """Why the newest token ends the completion; None where it does not. Asked once for each token."""
        is_spelt = self.stop_strings is not None and self.stop_strings.is_completed_by(
            self.last_token
        )
        if is_spelt or self.last_token in self.sampling.stop_ids:
            return "stop"
        return "length" if self.num_sampled >= self.sampling.max_new_tokens else None

    @property
    def num_missing(self) -> int:
        """Prompt tokens whose state is not in the slot yet."""
        return len(self.prompt) - (self.slot.length if self.slot else 0)

    @property
    def num_until_handover(self) -> int:
        """Tokens that can be sampled until the completion or its next piece has to be handed over."""
        left = self.sampling.max_new_tokens - self.num_sampled
        interval = self.sampling.stream_interval_tokens
        return min(left, interval - len(self.unsent_ids)) if interval > 0 else left

    def used_slot(self) -> Slot:
        """Return the slot of a running request.

        Raises:
            ContractError: it has none.
        """
        if self.slot is None:
            raise ContractError(f"request of session {self.session_id} runs without a slot")
        return self.slot
