"""What a session is opened with, and what a call meets that comes after its end."""

from dataclasses import dataclass, field

from longarc.errors import RolloutError
from longarc.gateway.asked import RecognitionRules
from longarc.gateway.budget import SessionBudget
from longarc.records.sampling import Sampling


class SessionClosed(RolloutError):  # noqa: N818 - a state of the session
    """The session was closed, or never opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What a session was opened with."""

    session_id: str
    sampling: Sampling
    thinking: bool
    max_context_tokens: int
    """Prompt and completion together [tokens]."""
    min_new_tokens: int
    """A turn with room for fewer than this ends the rollout [tokens]."""
    clear_thinking: bool = False
    """Whether a user message makes the model forget its earlier reasoning, which rewrites the history."""
    budget: SessionBudget = field(default_factory=SessionBudget)
    """How much the session may use."""
    repeat_window_s: float | None = None
    """How long after its answer a request with an equal body counts as that request sent again, unless the
    conversation went on [seconds]; 0 only while it runs, None never."""
    rules: RecognitionRules = field(default_factory=RecognitionRules)
    """How agents, windows, summaries and side requests are told apart."""
