"""One completion on its way through the engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longarc.engine.slots import Ids, Slot
from longarc.errors import ContractError, EngineError, EngineRequestError
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

    @property
    def draw_position(self) -> int:
        """Position in the seed's stream of the next token's draw."""
        return self.sampling.num_sampled_before + self.num_sampled

    def used_slot(self) -> Slot:
        """Return the slot of a running request.

        Raises:
            ContractError: it has none.
        """
        if self.slot is None:
            raise ContractError(f"request of session {self.session_id} runs without a slot")
        return self.slot


def checked_prompt(
    prompt_ids: Sequence[int], sampling: Sampling, *, max_context_tokens: int, vocab_size: int
) -> Ids:
    """Return the prompt as an array.

    Raises:
        EngineRequestError: it is empty or too long for the context, or holds an id that is no token.
    """
    if not prompt_ids:
        raise EngineRequestError("the prompt is empty; send at least one token")
    if sampling.max_new_tokens < 1:
        raise EngineRequestError(f"max_new_tokens={sampling.max_new_tokens} must be at least 1")
    needed = len(prompt_ids) + sampling.max_new_tokens
    if needed > max_context_tokens:
        raise EngineRequestError(
            f"prompt of {len(prompt_ids)} + max_new_tokens={sampling.max_new_tokens} is {needed} tokens, "
            f"but max_context_tokens={max_context_tokens}; shorten the prompt or ask for less"
        )
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        raise EngineRequestError(
            f"prompt ids span {lowest}..{highest}, but the vocabulary is 0..{vocab_size - 1}: "
            f"the tokenizer does not match the model"
        )
    return np.asarray(prompt_ids, dtype=np.int64)
