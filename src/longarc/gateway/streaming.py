"""Deltas of an answer while it is sampled: reasoning, text and whole calls, from ids.

::

    ids --splitter--> tags and text --regions--> reasoning | text | calls --> deltas
                                                                   (what the final parse may still take away waits)

The deltas of a turn, joined, are exactly the message that the session records: whatever could still
change is held back (half a character, half a tag, blanks at an end that is stripped, the beginning of a
stop string), and ``finish`` gives the rest from the recorded message. A call is told when it is closed,
because until then nobody knows whether it can be read. Property tests hold this against the parsers.
"""

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import NamedTuple, Protocol

from longarc.errors import ContractError
from longarc.records.message import Message, ToolCall, ToolSpec
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.glm_parse import GLM_TAGS
from longarc.tokens.tokenizer import Tokenizer


class DeltaKind(StrEnum):
    """What a delta adds to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One addition to an answer."""

    kind: DeltaKind
    text: str = ""
    """Of reasoning and content; never empty there."""
    call: ToolCall | None = None
    """The whole call."""


class _Region(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class _Part(NamedTuple):
    text: str
    is_tag: bool


_THINK, _END_THINK = _Part("<think>", True), _Part("</think>", True)
_CALL, _END_CALL = _Part("<tool_call>", True), _Part("</tool_call>", True)
_TAGS = tuple(part.text for part in (_THINK, _END_THINK, _CALL, _END_CALL))


class TurnStream:
    """Turns the ids of one answer into deltas."""

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        keeps_calls: bool = True,
        stop: Sequence[str] = (),
        call_id_prefix: str = "call",
    ) -> None:
        """Begin an answer.

        Args:
            chat_format: whose answer it is.
            tools: the tools of the prompt.
            thinking: as in the prompt.
            keeps_calls: whether calls are part of the answer.
            stop: texts that end the answer, which is cut before them.
            call_id_prefix: as in ``ChatFormat.parse``.
        """
        self._parse: Callable[[Sequence[int]], Message] = lambda ids: (
            chat_format.parse(ids, tools, thinking=thinking, call_id_prefix=call_id_prefix).message
        )
        self._stop_ids = frozenset(chat_format.stop_ids)
        self._keeps_calls = keeps_calls
        self._splitter = _splitter(chat_format)
        tags = chat_format.streamed_tags
        self._thinking = thinking and (tags is None or tags.opens_thinking)
        self._reasoning = _Channel(stop, strips=tags is None or tags.strips_reasoning)
        self._content = _Channel(stop, strips=True)
        self._region = _Region.START
        self._leading: list[str] = []
        """Blank text of which it is not known yet where it belongs."""
        self._ids: list[int] = []
        self._num_closed = 0
        self._calls: list[ToolCall] = []
        self._held: int | None = None
        """A stop id: it is no part of the text if it is the last id."""

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """Take in the next ids; return what is certain now."""
        if self._splitter is None:
            return []
        deltas: list[Delta] = []
        for token_id in token_ids:
            if self._held is not None:
                self._ids.append(self._held)
                self._take(self._held, deltas)
            self._held = token_id if token_id in self._stop_ids else None
            if self._held is None:
                self._ids.append(token_id)
                self._take(token_id, deltas)
        return _merged(deltas)

    def finish(self, message: Message) -> list[Delta]:
        """Return what is still missing of the recorded answer.

        Raises:
            ContractError: what was told already is not the beginning of it.
        """
        deltas = []
        for kind, channel, text in (
            (DeltaKind.REASONING, self._reasoning, message.reasoning or ""),
            (DeltaKind.CONTENT, self._content, message.content),
        ):
            if rest := channel.rest_of(text):
                deltas.append(Delta(kind=kind, text=rest))
        told = len(self._calls)
        if [_said(c) for c in message.tool_calls[:told]] != [_said(c) for c in self._calls]:
            raise ContractError(
                f"{told} tool calls were streamed that are not those of the recorded answer; the chat format's "
                f"parser reads a beginning otherwise than the whole"
            )
        return deltas + [Delta(kind=DeltaKind.CALL, call=c) for c in message.tool_calls[told:]]

    def _take(self, token_id: int, deltas: list[Delta]) -> None:
        assert self._splitter is not None
        for part in self._splitter.parts(token_id):
            self._place(part, deltas)

    def _place(self, part: _Part, deltas: list[Delta]) -> None:
        """Hand a part to the region it belongs to."""
        match self._region:
            case _Region.START:
                self._start(part, deltas)
            case _Region.REASONING if part == _END_THINK:
                self._region = _Region.CONTENT
            case _Region.REASONING:
                self._tell(DeltaKind.REASONING, self._reasoning, part.text, deltas)
            case _Region.CALL if part == _END_CALL:
                self._close_call(deltas)
                self._region = _Region.CONTENT
            case _Region.CALL:
                if part == _CALL:
                    self._close_call(deltas)
            case _Region.CONTENT if part == _CALL:
                self._region = _Region.CALL
            case _:
                self._tell(DeltaKind.CONTENT, self._content, part.text, deltas)

    def _start(self, part: _Part, deltas: list[Delta]) -> None:
        """Decide what an answer begins with; blanks alone decide nothing."""
        if not part.is_tag and not part.text.strip():
            self._leading.append(part.text)
            return
        if part == _THINK:
            self._region = _Region.REASONING
            return
        self._region = _Region.REASONING if self._thinking else _Region.CONTENT
        for text in self._leading:
            self._place(_Part(text, False), deltas)
        self._place(part, deltas)

    def _close_call(self, deltas: list[Delta]) -> None:
        number = self._num_closed
        self._num_closed += 1
        if not self._keeps_calls:
            return
        call = self._parse(self._ids).tool_calls[number]
        self._calls.append(call)
        deltas.append(Delta(kind=DeltaKind.CALL, call=call))

    def _tell(self, kind: DeltaKind, channel: "_Channel", text: str, deltas: list[Delta]) -> None:
        if certain := channel.add(text):
            deltas.append(Delta(kind=kind, text=certain))


class _Channel:
    """Text of which blanks at the ends, and what follows a stop string, may be taken away."""

    def __init__(self, stop: Sequence[str], *, strips: bool) -> None:
        self._stop = tuple(stop)
        self._strips = strips
        self._told: list[str] = []
        self._pending = ""

    def add(self, text: str) -> str:
        """Return what can be told now."""
        self._pending += text
        if self._strips and not self._told:
            self._pending = self._pending.lstrip()
        end = min((i for s in self._stop if (i := self._pending.find(s)) >= 0), default=None)
        certain = self._pending[:end]
        if end is None and self._stop:
            certain = certain[: len(certain) - _overlap(certain, self._stop)]
        certain = certain.rstrip()
        if certain:
            self._pending = self._pending[len(certain) :]
            self._told.append(certain)
        return certain

    def rest_of(self, text: str) -> str:
        """Return what of the recorded text was not told.

        Raises:
            ContractError: what was told is not its beginning.
        """
        told = "".join(self._told)
        if not text.startswith(told):
            raise ContractError(
                f"{len(told)} characters were streamed that are not the beginning of the recorded answer; the chat "
                f"format's parser reads a beginning otherwise than the whole"
            )
        return text[len(told) :]


class _Splitter(Protocol):
    """Cuts what was sampled into tags and text, id by id."""

    def parts(self, token_id: int) -> Iterator[_Part]:
        """Return what the next id makes certain."""
        ...


class _ById:
    """Tags are control ids; text that looks like one is text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_tokens
        self._tags = {special[tag]: _Part(tag, True) for tag in GLM_TAGS}
        self._bytes = tokenizer.token_bytes
        self._decoder = _utf8()

    def parts(self, token_id: int) -> Iterator[_Part]:
        """Cut at control ids."""
        tag = self._tags.get(token_id)
        if tag is None:
            if text := self._decoder.decode(self._bytes(token_id)):
                yield _Part(text, False)
            return
        if text := self._decoder.decode(b"", final=True):
            yield _Part(text, False)
        self._decoder.reset()
        yield tag


class _ByText:
    """Tags are text, which may begin and end anywhere in a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._decoder = _utf8()
        self._pending = ""

    def parts(self, token_id: int) -> Iterator[_Part]:
        """Cut at tags, and hold back what may be the beginning of one."""
        self._pending += self._decoder.decode(self._bytes(token_id))
        *before, rest = _TEXT_TAG.split(self._pending)
        held = _overlap(rest, _TAGS)
        self._pending = rest[len(rest) - held :]
        for piece in (*before, rest[: len(rest) - held]):
            if piece:
                yield _Part(piece, piece in _TAGS)


_TEXT_TAG = re.compile("(" + "|".join(map(re.escape, _TAGS)) + ")")


def _splitter(chat_format: ChatFormat) -> _Splitter | None:
    """Return None where beginnings of an answer cannot be read: it is told whole, at its end."""
    tags = chat_format.streamed_tags
    tokenizer = chat_format.tokenizer
    if tags is None or not tokenizer.is_byte_level:
        return None
    return _ById(tokenizer) if tags.by_id else _ByText(tokenizer)


def _utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _overlap(text: str, ends: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of ``ends``."""
    longest = min(len(text), max(map(len, ends)) - 1)
    for length in range(longest, 0, -1):
        tail = text[len(text) - length :]
        if any(end.startswith(tail) for end in ends):
            return length
    return 0


def _said(call: ToolCall) -> tuple[object, ...]:
    return (call.name, call.arguments, call.error)


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Join neighbours of one kind."""
    merged: list[Delta] = []
    for delta in deltas:
        if merged and delta.call is None and merged[-1].kind is delta.kind:
            merged[-1] = Delta(kind=delta.kind, text=merged[-1].text + delta.text)
        else:
            merged.append(delta)
    return merged
