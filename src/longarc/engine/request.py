"""One completion on its way through the engine."""

import asyncio
from dataclasses import dataclass, field

from longarc.engine.slots import Ids, Slot
from longarc.errors import ContractError, EngineError
from longarc.records.sampling import SampledTokens, Sampling


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
    unsent_version: int = 0
    has_sent: bool = False
    is_cancelled: bool = False

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
