"""A completion in the router's hands: what was asked, what was sampled, and what is left to ask."""

from collections.abc import Sequence
from dataclasses import replace

from longarc.records.sampling import FinishReason, SampledTokens, Sampling


class KeptCompletion:
    """Keeps every token that was handed over, so that another engine can go on behind the last one."""

    def __init__(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, keep_every_tokens: int
    ) -> None:
        """Begin.

        Args:
            prompt_ids: the prompt as it was asked; nobody changes it meanwhile.
            sampling: with a seed; draws are a function of seed and position, so the completion is the same
                wherever it goes on, as long as the weights are.
            keep_every_tokens: most tokens that an engine holds back [tokens].
        """
        self._prompt = prompt_ids
        self._sampling = sampling
        asked = sampling.stream_interval_tokens
        self._interval = min(asked, keep_every_tokens) if asked > 0 else keep_every_tokens
        self._ids: list[int] = []
        self._version = 0
        self.has_begun = False
        """Whether a piece was handed over."""

    @property
    def num_kept(self) -> int:
        """Tokens sampled so far [tokens]."""
        return len(self._ids)

    def request(self) -> tuple[Sequence[int], Sampling]:
        """Return prompt and sampling of what is left."""
        first = self._sampling.returns_routing_from
        if first is not None and self._ids:
            # What was kept drew its tokens with the choices up to the one before its last.
            first = max(first, len(self._prompt) + len(self._ids) - 1)
        ids = [*self._prompt, *self._ids] if self._ids else self._prompt
        return ids, replace(
            self._sampling,
            max_new_tokens=self._sampling.max_new_tokens - len(self._ids),
            num_sampled_before=self._sampling.num_sampled_before + len(self._ids),
            stream_interval_tokens=self._interval,
            returns_routing_from=first,
        )

    def add(self, piece: SampledTokens) -> SampledTokens:
        """Keep a piece; return it as the caller is to see it."""
        self._ids.extend(piece.token_ids)
        self._version = piece.policy_version
        # Where it went on, the engine found (or not) what is no prompt of the caller's.
        seen = replace(piece, num_cached_tokens=0) if self.has_begun else piece
        self.has_begun = True
        return seen

    def ending(self) -> SampledTokens | None:
        """Return the last piece where every token is there and only the word that it ended was lost."""
        reason: FinishReason
        if self._ids and self._ids[-1] in self._sampling.stop_ids:
            reason = "stop"
        elif len(self._ids) >= self._sampling.max_new_tokens > 0:
            reason = "length"
        else:
            return None
        return SampledTokens(
            token_ids=(), logprobs=(), policy_version=self._version, finish_reason=reason
        )
