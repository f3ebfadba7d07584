"""What is kept of a request whose client owns its context: its claims, its messages, and what they hint at.

Only facts are collected here, when the request is answered, and logged with its turn. What they mean
(agents, windows, kinds) is worked out from all turns of a session by ``places``, because some of it
shows only later: a summary is known by the window that opens with it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from longarc.records.lineage import Lineage
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.segment import SegmentKind

_SCANNED_CHARS = 4000
"""Of each end of a text, in which phrases are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecognitionRules:
    """How agents, windows, summaries and side requests are told apart where headers do not tell.

    Phrases are parts of prompts, in lower case; they are looked for in the system prompt of a new
    conversation and in the user message that ends a request.
    """

    summary_phrases: tuple[str, ...] = (
        "your task is to create a detailed summary of the conversation",
        "tasked with summarizing conversations",
        "context checkpoint compaction",
        "provide a detailed prompt for continuing our conversation",
        "maintaining a context-aware state summary",
    )
    """A request with one of these asks for a summary (Claude Code, Codex, opencode, OpenHands)."""
    side_phrases: tuple[str, ...] = (
        "you are a title generator",
        "word title for the following conversation",
        "sentence-case title",
        "indicates a new conversation topic",
        "summarize this coding conversation in under",
    )
    """A request with one of these is beside the work (Claude Code, opencode)."""
    side_max_new_tokens: int = 16
    """A conversation without tools that asks for at most this many is a probe [tokens]; 0 switches the rule off."""
    toolless_is_side: bool = True
    """Whether a conversation of one request, without tools and without the history of another, is beside the work
    of a session whose agents have tools."""
    min_quoted_chars: int = 40
    """An answer of at least this length that stands inside the prompt of a new conversation was carried there."""
    num_looked_back: int = 8
    """Newest turns whose answers are looked for in a new conversation."""


class Answered(Protocol):
    """A stored turn, as far as it matters here."""

    @property
    def index(self) -> int:
        """Its position in the session."""
        ...

    @property
    def message(self) -> Message:
        """Its answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request: claims and facts."""

    lineage: Lineage
    said: tuple[Message, ...]
    """The messages behind the stored turn that the request continues; all of them where it continues none."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools of a conversation that continues no turn; what continues one has that one's."""
    opening: bytes = b""
    """Digest of the system prompt of such a conversation."""
    max_new_tokens: int | None = None
    """What the client asked for [tokens]."""
    hint: SegmentKind | None = None
    """What a phrase of its prompt says."""
    echoes: int | None = None
    """Of a conversation that continues no turn: the newest turn whose answer is one of its messages."""
    carries: int | None = None
    """Of such a conversation: the one turn whose answer its other messages quote."""
    elapsed_s: float = 0.0
    """Age of the session when the turn was answered [seconds]."""


def asked(
    lineage: Lineage,
    said: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    turns: Sequence[Answered],
    is_new: bool,
    max_new_tokens: int | None,
    rules: RecognitionRules,
    elapsed_s: float,
) -> Asked:
    """Collect what is kept of a request.

    Args:
        lineage: the client's claims.
        said: the messages that are new.
        tools: the tools of the prompt.
        turns: the turns of the session so far.
        is_new: whether the conversation continues no stored turn.
        max_new_tokens: what the client asked for.
        rules: what to look for.
        elapsed_s: age of the session [seconds].
    """
    last = said[-1] if said else None
    texts = [last.content] if last is not None and last.role is Role.USER else []
    if not is_new:
        return Asked(
            lineage=lineage,
            said=tuple(said),
            max_new_tokens=max_new_tokens,
            hint=_hint(texts, rules),
            elapsed_s=elapsed_s,
        )
    system = [message.content for message in _opening(said)]
    digest = hashlib.blake2b(digest_size=8)
    for text in system:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    echoes, carries = _links(said, turns[-rules.num_looked_back :], rules)
    return Asked(
        lineage=lineage,
        said=tuple(said),
        tools=tuple(tools),
        opening=digest.digest(),
        max_new_tokens=max_new_tokens,
        hint=_hint([*system, *texts], rules),
        echoes=echoes,
        carries=carries,
        elapsed_s=elapsed_s,
    )


def _opening(said: Sequence[Message]) -> Iterable[Message]:
    for message in said:
        if message.role is not Role.SYSTEM:
            return
        yield message


def _hint(texts: Iterable[str], rules: RecognitionRules) -> SegmentKind | None:
    for text in texts:
        scanned = text[:_SCANNED_CHARS] + "\n" + text[_SCANNED_CHARS:][-_SCANNED_CHARS:]
        lowered = " ".join(scanned.lower().split())
        if any(phrase in lowered for phrase in rules.summary_phrases):
            return SegmentKind.SUMMARY
        if any(phrase in lowered for phrase in rules.side_phrases):
            return SegmentKind.SIDE
    return None


def _links(
    said: Sequence[Message], turns: Sequence[Answered], rules: RecognitionRules
) -> tuple[int | None, int | None]:
    """Return the newest turn that the conversation echoes, and the one turn that it quotes."""
    if not turns:
        return None, None
    spoken = {(m.content, _call_names(m)) for m in said if m.role is Role.ASSISTANT}
    echoed = [t.index for t in turns if (t.message.content, _call_names(t.message)) in spoken]
    told = _squeezed("\n".join(m.content for m in said if m.role is not Role.ASSISTANT))
    quoted = [
        turn.index
        for turn in turns
        if len(text := _squeezed(_summary_text(turn.message.content))) >= rules.min_quoted_chars
        and text in told
    ]
    # Several quoted answers are a folded history, not a summary.
    return max(echoed, default=None), quoted[0] if len(quoted) == 1 else None


def _call_names(message: Message) -> tuple[str, ...]:
    return tuple(call.name for call in message.tool_calls)


def _summary_text(content: str) -> str:
    """Return what clients take over of an answer: what stands between summary tags, where there are some."""
    _, opened, rest = content.partition("<summary>")
    text, closed, _ = rest.partition("</summary>")
    return text if opened and closed else content


def _squeezed(text: str) -> str:
    return " ".join(text.split())
