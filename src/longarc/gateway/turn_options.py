"""What a door may ask of one turn besides the conversation itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from longarc.records.lineage import Lineage
from longarc.records.sampling import SampledTokens, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """What is known of a turn before its first token."""

    num_prompt_tokens: int
    call_id_prefix: str
    """The n-th call of the answer gets the id ``{prefix}_{n}``."""
    thinking: bool
    """Whether the answer begins with reasoning."""
    opening_ids: tuple[int, ...] = ()
    """Ids that begin the answer and were not sampled."""


OnProgress: TypeAlias = Callable[[TurnStart | SampledTokens], None]
"""Called with the start of a turn and then with each piece of its completion, in order, while it is sampled;
raising ends the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """How one turn is to be answered; the defaults are those of the session."""

    max_new_tokens: int | None = None
    """Lowers the session's budget for this turn [tokens]."""
    tool_choice: Literal["auto", "none"] = "auto"
    """``none`` keeps the tools in the prompt, so that its ids stay the same, and leaves calls out of the answer."""
    forced_call: str | None = None
    """The tool that is called, "" for any: the beginning of a call is put behind the prompt, as context that is not
    trained, and the model writes the rest. It does not think before it."""
    one_call: bool = False
    """The answer ends with its first call."""
    sampling: Sampling | None = None
    """Replaces the session's distribution for this turn, its seed taken as it is."""
    seed: int | None = None
    """Replaces the seed of this turn, whatever the distribution."""
    thinking: bool | None = None
    """Replaces the session's choice for this turn."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the tokens that spell one are kept and trained, the answer is cut before it."""
    lineage: Lineage | None = None
    """What the client says of its agent; None for a client that does not own its context."""
    idempotency_key: str | None = None
    """Requests of a session with one key are one request: the first is sampled, the others get its tokens."""
    body_digest: bytes | None = None
    """Digest of the whole request; one equal to it counts as its repetition while it runs, and for the session's
    ``repeat_window_s`` afterwards. None where equal requests are different ones."""
    is_retry: bool = False
    """The client asks again because it saw no answer; a turn that answers this conversation is returned."""
    on_progress: OnProgress | None = None
    """Gets what is sampled while it is sampled. A turn that is repeated is handed over in one piece."""
    stream_interval_tokens: int = 1
    """Tokens between two pieces, where ``on_progress`` is set [tokens]."""


class ToldTokens:
    """Hands progress on, where somebody wants it, and counts the tokens that were told."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self.num = 0
        """Sampled tokens that somebody has seen [tokens]."""

    def __call__(self, progress: TurnStart | SampledTokens) -> None:
        """Hand it on."""
        if self._on_progress is None:
            return
        if isinstance(progress, SampledTokens):
            self.num += len(progress.token_ids)
        self._on_progress(progress)
