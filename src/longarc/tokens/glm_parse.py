"""Reads what a GLM model sampled: reasoning, content and XML tool calls, from ids.

Tags are found by id, so text that merely looks like a tag stays text, and argument values come out
verbatim. Both spellings are read: GLM-4.7's without newlines and GLM-4.5's with a newline after the
name and between arguments.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import argument_schemas, argument_value
from longarc.tokens.chat_format import ParsedTurn
from longarc.tokens.tokenizer import Tokenizer

GLM_TAGS: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""What cuts a completion into pieces."""


class _Piece(NamedTuple):
    """A tag (``text`` is its name) or the text between two tags."""

    text: str
    is_tag: bool


_TAG_PIECE: Final = {tag: _Piece(tag, True) for tag in GLM_TAGS}
_THINK, _END_THINK = _TAG_PIECE["<think>"], _TAG_PIECE["</think>"]
_CALL, _END_CALL = _TAG_PIECE["<tool_call>"], _TAG_PIECE["</tool_call>"]


class GlmParser:
    """Parses completions of one tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, *, strips_reasoning: bool, model_opens_thinking: bool = False
    ) -> None:
        """Bind a tokenizer.

        Args:
            tokenizer: it has all the tags.
            strips_reasoning: whether blanks around the reasoning are no part of it.
            model_opens_thinking: with thinking on, ``<think>`` is sampled and not part of the prompt.
        """
        self._tokenizer = tokenizer
        self._strips_reasoning = strips_reasoning
        self._model_opens_thinking = model_opens_thinking
        self._tag_of_id = {tokenizer.special_id(tag): _TAG_PIECE[tag] for tag in GLM_TAGS}

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        call_id_prefix: str,
    ) -> ParsedTurn:
        """Read a completion without its stop id."""
        problems: list[str] = []
        pieces = self._pieces(token_ids)
        reasoning, pieces = self._reasoning(pieces, problems, thinking=thinking)
        content: list[str] = []
        calls: list[ToolCall] = []
        while pieces:
            if pieces[0] == _CALL:
                end = _end_of_call(pieces)
                call = _read_call(pieces[1:end], tools, f"{call_id_prefix}_{len(calls)}")
                if call.error:
                    problems.append(f"tool call {len(calls)} ({call.name!r}): {call.error}")
                calls.append(call)
                pieces = pieces[end:]
            else:
                if pieces[0].is_tag:
                    problems.append(f"stray {pieces[0].text}")
                elif calls and pieces[0].text.strip():
                    problems.append(f"text after a tool call: {pieces[0].text!r}")
                content.append(pieces[0].text)
                pieces = pieces[1:]
        message = Message(
            role=Role.ASSISTANT,
            content="".join(content).strip(),
            reasoning=reasoning,
            tool_calls=tuple(calls),
        )
        return ParsedTurn(message=message, problems=tuple(problems))

    def _pieces(self, token_ids: Sequence[int]) -> list[_Piece]:
        pieces: list[_Piece] = []
        start = 0
        for position, token_id in enumerate(token_ids):
            tag = self._tag_of_id.get(token_id)
            if tag is not None:
                self._add_text(pieces, token_ids[start:position])
                pieces.append(tag)
                start = position + 1
        self._add_text(pieces, token_ids[start:])
        return pieces

    def _add_text(self, pieces: list[_Piece], token_ids: Sequence[int]) -> None:
        if token_ids:
            pieces.append(_Piece(self._tokenizer.decode(token_ids, keep_special=True), False))

    def _reasoning(
        self, pieces: list[_Piece], problems: list[str], *, thinking: bool
    ) -> tuple[str | None, list[_Piece]]:
        """Split off the reasoning; without thinking there is some only if the model opened it itself."""
        tail = next((i for i, p in enumerate(pieces) if p.is_tag or p.text.strip()), len(pieces))
        opens = tail < len(pieces) and pieces[tail] == _THINK
        is_expected = thinking and self._model_opens_thinking
        if opens:
            if not is_expected:
                problems.append("<think> although the prompt already decided about thinking")
            pieces = pieces[tail + 1 :]
        elif not thinking or is_expected:
            return None, pieces
        end = pieces.index(_END_THINK) if _END_THINK in pieces else len(pieces)
        if end == len(pieces):
            problems.append("reasoning without </think>")
        text = "".join(piece.text for piece in pieces[:end])
        if self._strips_reasoning:
            text = text.strip()
        return text or None, pieces[end + 1 :]


def _end_of_call(pieces: Sequence[_Piece]) -> int:
    """Return where the call that starts at 0 ends: behind its closing tag or before the next call."""
    for index in range(1, len(pieces)):
        if pieces[index] == _END_CALL:
            return index + 1
        if pieces[index] == _CALL:
            return index
    return len(pieces)


def _read_call(pieces: Sequence[_Piece], tools: Sequence[ToolSpec], call_id: str) -> ToolCall:
    """Read one call from what follows ``<tool_call>``."""
    name = pieces[0].text.strip() if pieces and not pieces[0].is_tag else ""
    try:
        arguments = _read_arguments(pieces, argument_schemas(tools, name))
        if not name:
            raise ValueError("the call names no function")
    except ValueError as error:
        return ToolCall(id=call_id, name=name, arguments={}, error=str(error))
    return ToolCall(id=call_id, name=name, arguments=arguments)


def _read_arguments(pieces: Sequence[_Piece], schemas: Mapping[str, Json]) -> dict[str, Json]:
    if not pieces or pieces[-1] != _END_CALL:
        raise ValueError("the call is not closed by </tool_call>")
    rest = pieces[0 if pieces[0].is_tag else 1 : -1]
    arguments: dict[str, Json] = {}
    position = 0
    while position < len(rest):
        if not rest[position].is_tag and not rest[position].text.strip():
            position += 1
            continue
        key, position = _tagged(rest, position, "arg_key")
        if position < len(rest) and not rest[position].is_tag and not rest[position].text.strip():
            position += 1
        text, position = _tagged(rest, position, "arg_value")
        if key in arguments:
            raise ValueError(f"argument {key!r} is given twice")
        schema = schemas.get(key)
        try:
            arguments[key] = argument_value(text, schema if isinstance(schema, Mapping) else None)
        except ValueError as error:
            raise ValueError(f"argument {key!r} must be JSON ({error}), got {text!r}") from None
    return arguments


def _tagged(pieces: Sequence[_Piece], position: int, tag: str) -> tuple[str, int]:
    """Read ``<tag>text</tag>`` at a position; return the text and the position behind it."""
    opening, closing = _TAG_PIECE[f"<{tag}>"], _TAG_PIECE[f"</{tag}>"]
    if position >= len(pieces) or pieces[position] != opening:
        found = repr(pieces[position].text) if position < len(pieces) else "the end of the call"
        raise ValueError(f"expected <{tag}>, found {found}")
    position += 1
    text = ""
    if position < len(pieces) and not pieces[position].is_tag:
        text = pieces[position].text
        position += 1
    if position >= len(pieces) or pieces[position] != closing:
        raise ValueError(f"<{tag}> is not closed")
    return text, position + 1
