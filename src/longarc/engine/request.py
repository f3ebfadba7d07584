"""One completion on its way through the engine."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longarc.engine.ids import whole_ids
from longarc.engine.pages import Ids
from longarc.engine.seats import Seat
from longarc.engine.stop_strings import StopStrings, TokenBytes
from longarc.engine.weights import EngineWeights
from longarc.errors import ContractError, EngineError, EngineRequestError
from longarc.models.routed_rows import RoutedTokens, blobs_of
from longarc.records.sampling import MIN_TEMPERATURE, FinishReason, SampledTokens, Sampling
from longarc.tokens.grammar import AllowedIds, GrammarWalk


@dataclass(slots=True, eq=False)
class Request:
    """One completion on its way."""

    prompt: Ids
    sampling: Sampling
    session_id: str
    seed: int
    pieces: asyncio.Queue[SampledTokens | EngineError] = field(default_factory=asyncio.Queue)
    """Bounded by ``sampling.max_new_tokens`` pieces."""
    arrival: int = 0
    """Requests that came before it."""
    seat: Seat | None = None
    num_cached: int = 0
    """Prompt tokens found in the cache when it was first admitted."""
    has_begun: bool = False
    """Whether it was ever admitted."""
    known: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Prompt, and what was sampled before it was last admitted: what has to be in the cache to go on."""
    sampled_ids: list[int] = field(default_factory=list)
    unsent_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[float] = field(default_factory=list)
    unsent_kept: list[tuple[int, ...]] = field(default_factory=list)
    unsent_raw: list[float] = field(default_factory=list)
    unsent_routing: list[RoutedTokens] = field(default_factory=list)
    num_routed: int = 0
    """Positions whose routing was noted, those before the first that was asked for included."""
    unsent_version: int = 0
    weights: EngineWeights | None = None
    """Older ones that it ends with; None where it goes along with updates."""
    stop_strings: StopStrings | None = None
    walk: GrammarWalk | None = None
    """Where the completion stands in the grammar of its constraint; what was sampled before it came here is behind it."""
    has_sent: bool = False
    is_cancelled: bool = False

    def watch_for_stop_strings(self, token_bytes: TokenBytes) -> None:
        """Look for the stop strings from now on; one may have begun where the completion was begun."""
        self.stop_strings = StopStrings(self.sampling.stop_strings, token_bytes)
        for token_id in self.prompt[len(self.prompt) - self.sampling.num_sampled_before :].tolist():
            self.stop_strings.is_completed_by(token_id)

    def allowed(self) -> AllowedIds | None:
        """Return the ids that its constraint allows next; None where it has none.

        Raises:
            ContractError: nothing can follow.
        """
        if self.walk is None:
            return None
        self.walk.take(self.sampled_ids[self.walk.num_taken - self.sampling.num_sampled_before :])
        return self.walk.allowed()

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
        self.sampled_ids.extend(token_ids)

    def unrouted(self, first: int) -> range:
        """Return the positions from ``first`` on whose routing is to be noted, up to the one that drew the newest token."""
        return range(max(first, self.num_routed), len(self.prompt) + self.num_sampled - 1)

    def note_routing(self, routed: RoutedTokens, stop: int) -> None:
        """Keep what the ``unrouted`` positions up to ``stop`` were routed to until it is handed over."""
        self.num_routed = stop
        self.unsent_routing.append(routed)

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
            routing=tuple(blobs_of(self.unsent_routing)),
        )
        self.has_sent = True
        for unsent in (self.unsent_ids, self.unsent_logprobs, self.unsent_kept, self.unsent_raw):
            unsent.clear()
        self.unsent_routing.clear()
        return piece

    def ending_among(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Say how many of the next tokens belong to the completion, and why the last of them ends it, if it does.

        Asked once for each token.
        """
        for count, token_id in enumerate(token_ids, start=1):
            is_spelt = self.stop_strings is not None and self.stop_strings.is_completed_by(token_id)
            if is_spelt or token_id in self.sampling.stop_ids:
                return count, "stop"
        return len(token_ids), "length" if len(token_ids) >= self.num_left else None

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.sampled_ids)

    @property
    def last_token(self) -> int:
        """The newest token; its state is computed with the next step."""
        return self.sampled_ids[-1] if self.sampled_ids else int(self.prompt[-1])

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_new_tokens - self.num_sampled

    def tokens(self) -> Ids:
        """Return the prompt and what was sampled."""
        if not self.sampled_ids:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.sampled_ids, dtype=np.int64)])

    @property
    def num_missing(self) -> int:
        """Known tokens whose state is not in the cache yet."""
        return len(self.known) - (self.seat.length if self.seat else 0)

    @property
    def num_until_handover(self) -> int:
        """Tokens that can be sampled until the completion or its next piece has to be handed over."""
        interval = self.sampling.stream_interval_tokens
        left = self.num_left
        return min(left, interval - len(self.unsent_ids)) if interval > 0 else left

    @property
    def draw_position(self) -> int:
        """Position in the seed's stream of the next token's draw."""
        return self.sampling.num_sampled_before + self.num_sampled

    @property
    def has_newest_token(self) -> bool:
        """Whether all that is known is to be computed, and the newest token is not a part of it."""
        return len(self.known) < len(self.prompt) + self.num_sampled

    def used_seat(self) -> Seat:
        """Return the seat of a running request.

        Raises:
            ContractError: it has none.
        """
        if self.seat is None:
            raise ContractError(f"request of session {self.session_id} runs without a seat")
        return self.seat


def checked_prompt(
    prompt_ids: Sequence[int], sampling: Sampling, *, max_context_tokens: int, vocab_size: int
) -> Ids:
    """Return the prompt as an array.

    Raises:
        EngineRequestError: it is empty or too long for the context, or holds an id that is no token or no whole number.
    """
    if not prompt_ids:
        raise EngineRequestError("the prompt is empty; send at least one token")
    if sampling.num_sampled_before > len(prompt_ids):
        raise EngineRequestError(
            f"num_sampled_before={sampling.num_sampled_before} are to be the end of a prompt that has "
            f"{len(prompt_ids)} tokens; send them with it"
        )
    if (sampling.returns_routing_from or 0) >= len(prompt_ids):
        raise EngineRequestError(
            f"returns_routing_from={sampling.returns_routing_from} lies behind a prompt of {len(prompt_ids)} tokens, "
            f"whose last one draws the first token; ask from {len(prompt_ids) - 1} on at most"
        )
    needed = len(prompt_ids) + sampling.max_new_tokens
    if needed > max_context_tokens:
        raise EngineRequestError(
            f"prompt of {len(prompt_ids)} + max_new_tokens={sampling.max_new_tokens} is {needed} tokens, "
            f"but max_context_tokens={max_context_tokens}; shorten the prompt or ask for less"
        )
    return np.asarray(_checked_ids("prompt ids", prompt_ids, vocab_size), dtype=np.int64)


def check_scoring(
    token_ids: Sequence[int], temperature: float, *, max_context_tokens: int, vocab_size: int
) -> None:
    """Refuse what cannot be scored.

    Raises:
        EngineRequestError: there are no tokens, too many of them or some that are none, or the temperature leaves
            no distribution.
    """
    if not token_ids:
        raise EngineRequestError("there is nothing to score: token_ids is empty; send at least one")
    if len(token_ids) > max_context_tokens:
        raise EngineRequestError(
            f"cannot score {len(token_ids)} tokens: max_context_tokens={max_context_tokens}"
        )
    if not MIN_TEMPERATURE <= temperature < math.inf:
        raise EngineRequestError(
            f"temperature={temperature} has to be at least {MIN_TEMPERATURE} and finite to score: at 0 there is "
            f"no distribution. 1 is the model's own"
        )
    _checked_ids("token ids", token_ids, vocab_size)


def _checked_ids(what: str, ids: Sequence[int], vocab_size: int) -> list[int]:
    ids = whole_ids(what, ids)
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:
        raise EngineRequestError(
            f"{what} span {lowest}..{highest}, but the vocabulary is 0..{vocab_size - 1}: "
            f"the tokenizer does not match the model"
        )
    return ids
