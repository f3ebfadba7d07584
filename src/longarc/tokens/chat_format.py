"""What every chat format does: messages to ids with a training mask, and sampled ids back to a message.

Formats work on tokens, not on text. A conversation is rendered whole once, when it opens; after that
the ids that were sampled are kept and ``tail_after`` renders only what follows them, because
rendering a sampled answer again may spell it differently (several spellings decode to one text).
Not every format only ever grows: where the history would read otherwise, ``tail_after`` says so, and the
conversation goes on as a new branch with its real prompt.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from longarc.records.message import Message, ToolSpec
from longarc.tokens.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as ids. Both fields have one length L."""

    token_ids: tuple[int, ...]
    train_mask: tuple[bool, ...]
    """True where an assistant speaks: reasoning, content, tool calls and the token that ends its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A sampled completion as a message."""

    message: Message
    problems: tuple[str, ...] = ()
    """Departures from the format, for people to read; calls that cannot run also carry ``error``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """An assistant's turn whose ids are kept, with the conversation that it ends."""

    prompt_ids: Sequence[int]
    """What the engine saw."""
    sampled_ids: Sequence[int]
    """What it sampled; at least one."""
    messages: Sequence[Message]
    """The conversation; the last message is the turn. Answers carry the reasoning that was sampled."""
    tools: Sequence[ToolSpec] = ()
    """The tools of the prompt."""
    clear_thinking: bool = False
    """As in ``ChatFormat.render``."""

    def stop_id(self, stop_ids: Collection[int]) -> int | None:
        """Return the id that ended the turn; None where it was cut off."""
        last = self.sampled_ids[-1]
        return last if last in stop_ids else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTags:
    """How the beginning of a completion is read before its end is known.

    Holds for formats whose completions are ``[<think>]reasoning</think>text<tool_call>...</tool_call>...``,
    and whose ``parse`` reads no beginning otherwise than the whole.
    """

    by_id: bool
    """Whether tags are control ids (those of ``glm_parse``), or text wherever it stands."""
    strips_reasoning: bool
    """Whether ``parse`` takes blanks from both ends of the reasoning, as it does from the content."""
    opens_thinking: bool = True
    """Whether with thinking on the prompt opens the reasoning; False where the model does so itself, if it does."""


@runtime_checkable
class ChatFormat(Protocol):
    """One family of models' way to write a conversation."""

    @property
    def name(self) -> str:
        """Name and version, part of the identity of stored conversations."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the format writes with."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant's turn when sampled; they belong to the turn."""
        ...

    @property
    def streamed_tags(self) -> StreamedTags | None:
        """How completions are read while they are sampled; None where that is not possible."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool,
        clear_thinking: bool = True,
        add_generation_prompt: bool,
        untrained: Collection[int] = (),
    ) -> RenderedChat:
        """Render a whole conversation.

        Args:
            messages: the conversation.
            tools: the tools that the model may call.
            thinking: whether the model is to think before it answers.
            clear_thinking: drop the reasoning of turns before the last user message.
            add_generation_prompt: open the next assistant turn. If False and the last message is an
                assistant's, the token that ends its turn follows, so that a model trained on it stops.
            untrained: indices of assistant messages that stay in context with mask False.
        """
        ...

    def tail_after(
        self, turn: StoredTurn, messages: Sequence[Message], *, thinking: bool
    ) -> tuple[int, ...] | None:
        """Render what follows a stored turn, with the opening of the next assistant turn.

        What ended the turn is not repeated: the stored ids and the tail together are the next prompt.

        Args:
            turn: the turn that is kept.
            messages: the messages after it.
            thinking: as in ``render``.

        Returns:
            The ids; None where the format would not show the stored turn as it was, so that the conversation has
            to be rendered whole.
        """
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool,
        call_id_prefix: str = "call",
    ) -> ParsedTurn:
        """Read a completion, which need not be well-formed; never raises for what a model wrote.

        Args:
            token_ids: the completion, with its stop id if it has one.
            tools: their schemas say which arguments are strings.
            thinking: as in the ``render`` that made the prompt.
            call_id_prefix: the n-th call gets the id ``{prefix}_{n}``.
        """
        ...

    def call_opening(self, name: str | None, *, thinking: bool) -> tuple[int, ...] | None:
        """Return the ids that begin a call, right behind a prompt; None where the format has none.

        Args:
            name: of the tool; None leaves it to the model.
            thinking: as in the prompt; reasoning that it opened is closed first, empty.
        """
        ...


class Rewrites:
    """Stored turns that a format could not continue: counted, and the first one said in the log."""

    def __init__(self, format_name: str) -> None:
        self._format_name = format_name
        self.num = 0
        """How many there were [turns]."""
        self.first_reason = ""
        """Why, the first time."""

    def add(self, reason: str) -> None:
        """Note one."""
        self.num += 1
        if self.num == 1:
            self.first_reason = reason
            _log.warning("%s", self.explain())

    def explain(self) -> str:
        """Return what happened, for people; empty where nothing did."""
        if not self.num:
            return ""
        return (
            f"chat format {self._format_name} does not always continue a conversation as it stood "
            f"({self.first_reason}); such turns get their whole prompt anew, in a segment of its own"
        )


class TokenWriter:
    """Collects ids with their mask; neighbouring text is encoded as one string.

    Text is data: only ``special`` places control tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._text: list[str] = []
        self._text_is_trained = False

    def text(self, text: str, *, trained: bool = False) -> None:
        """Add text."""
        if trained != self._text_is_trained:
            self._flush()
            self._text_is_trained = trained
        self._text.append(text)

    def special(self, token: str, *, trained: bool = False) -> None:
        """Add one control token."""
        self._flush()
        self._ids.append(self._tokenizer.special_id(token))
        self._mask.append(trained)

    def finish(self) -> RenderedChat:
        """Return all that was added."""
        self._flush()
        return RenderedChat(token_ids=tuple(self._ids), train_mask=tuple(self._mask))

    def _flush(self) -> None:
        if self._text:
            ids = self._tokenizer.encode("".join(self._text))
            self._ids += ids
            self._mask += [self._text_is_trained] * len(ids)
            self._text.clear()
