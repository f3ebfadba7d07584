"""The chat formats of GLM-4.5, GLM-4.7, GLM-5 and GLM-5.2, at token level.

::

    [gMASK]<sop> <|system|>TOOLS <|system|>TEXT <|user|>TEXT <|assistant|><think>R</think>TEXT<tool_call>..</tool_call>
        <|observation|><tool_response>TEXT</tool_response> <|assistant|><think>
                                                                       ^ sampling starts here

There is no end-of-turn token: an assistant's turn ends where it samples the role token that opens the
next turn, so that token belongs to the assistant and is trained. ``<|assistant|>`` and the ``<think>``
(or lone ``</think>``) behind it come from the prompt and are not.

GLM-4.5 puts line breaks around everything, and its prompt ends at ``<|assistant|>``: with thinking the model
samples ``<think>`` itself, without it the prompt goes on with an empty block and every question ends in ``/nothink``.

Source: the models' own chat templates (wire format, kept verbatim).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal, TypeAlias

from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import dump_json, tool_function
from longarc.tokens.chat_format import (
    ParsedTurn,
    RenderedChat,
    StoredTurn,
    StreamedTags,
    TokenWriter,
)
from longarc.tokens.glm_parse import GlmParser
from longarc.tokens.tokenizer import Tokenizer

GlmVersion: TypeAlias = Literal["glm-4.5", "glm-4.7", "glm-5.2"]
"""``glm-4.5`` is also the format of GLM-4.6, ``glm-4.7`` that of GLM-5."""

_ROLE_TOKEN: Final = {
    Role.SYSTEM: "<|system|>",
    Role.USER: "<|user|>",
    Role.ASSISTANT: "<|assistant|>",
    Role.TOOL: "<|observation|>",
}
_STOP_TOKENS: Final = ("<|endoftext|>", "<|user|>", "<|observation|>")

_TOOLS_BEFORE: Final = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_AFTER: Final = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following "
    "XML format:\n"
)
_CALL_EXAMPLE: Final = (
    "<tool_call>", "{function-name}", "\n", "<arg_key>", "{arg-key-1}", "</arg_key>", "\n", "<arg_value>",
    "{arg-value-1}", "</arg_value>", "\n", "<arg_key>", "{arg-key-2}", "</arg_key>", "\n", "<arg_value>",
    "{arg-value-2}", "</arg_value>", "\n", "...", "\n", "</tool_call>",
)  # fmt: skip
"""The line breaks are GLM-4.5's."""
_NO_THINKING: Final = "/nothink"


class GlmFormat:
    """GLM's chat format; see ``ChatFormat`` for what the methods mean."""

    def __init__(self, tokenizer: Tokenizer, *, version: GlmVersion = "glm-4.7") -> None:
        self._tokenizer = tokenizer
        self._is_5_2 = version == "glm-5.2"
        self._is_4_5 = version == "glm-4.5"
        self._break = "\n" if self._is_4_5 else ""
        self._version = version
        self._parser = GlmParser(
            tokenizer, strips_reasoning=not self._is_5_2, model_opens_thinking=self._is_4_5
        )
        self._stop_ids = tuple(tokenizer.special_id(token) for token in _STOP_TOKENS)

    @property
    def name(self) -> str:
        """Version of the template."""
        return self._version

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the format writes with."""
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``<|endoftext|>``, ``<|user|>`` and ``<|observation|>``."""
        return self._stop_ids

    @property
    def streamed_tags(self) -> StreamedTags:
        """Tags are control ids."""
        return StreamedTags(
            by_id=True,
            strips_reasoning=not self._is_5_2,
            opens_thinking=not self._is_4_5,
        )

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
        """Render a whole conversation; see ``ChatFormat.render``."""
        out = TokenWriter(self._tokenizer)
        out.special("[gMASK]")
        out.special("<sop>")
        if self._is_5_2 and thinking:
            out.special("<|system|>")
            out.text("Reasoning Effort: Max")
        if tools:
            self._tools(out, tools)
        last_user = max((i for i, m in enumerate(messages) if m.role is Role.USER), default=-1)
        self._messages(
            out,
            messages,
            thinking=thinking,
            keeps_reasoning=lambda index: not clear_thinking or index > last_user,
            untrained=untrained,
        )
        if add_generation_prompt:
            self._generation_prompt(out, thinking=thinking)
        elif messages and messages[-1].role is Role.ASSISTANT:
            stop = "<|observation|>" if messages[-1].tool_calls else "<|user|>"
            out.special(stop, trained=len(messages) - 1 not in untrained)
        return out.finish()

    def render_tail(
        self, messages: Sequence[Message], *, previous_stop_id: int | None, thinking: bool
    ) -> tuple[int, ...]:
        """Render what follows a stored assistant turn, with the opening of the next one.

        Args:
            messages: the messages after the stored turn.
            previous_stop_id: last id of the stored turn if it is a stop id, None if it was cut off. Where the tail
                begins with that very id, it is not repeated.
            thinking: as in ``render``.
        """
        out = TokenWriter(self._tokenizer)
        self._messages(
            out, messages, thinking=thinking, keeps_reasoning=lambda _: True, untrained=()
        )
        self._generation_prompt(out, thinking=thinking)
        ids = out.finish().token_ids
        return ids[1:] if ids[0] == previous_stop_id else ids

    def tail_after(
        self, turn: StoredTurn, messages: Sequence[Message], *, thinking: bool
    ) -> tuple[int, ...]:
        """Render what follows a stored turn, which always extends it; see ``ChatFormat.tail_after``."""
        stop_id = turn.stop_id(self._stop_ids)
        return self.render_tail(messages, previous_stop_id=stop_id, thinking=thinking)

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool,
        call_id_prefix: str = "call",
    ) -> ParsedTurn:
        """Read a completion; see ``ChatFormat.parse``."""
        is_stopped = bool(token_ids) and token_ids[-1] in self._stop_ids
        body = token_ids[:-1] if is_stopped else token_ids
        return self._parser.parse(body, tools, thinking=thinking, call_id_prefix=call_id_prefix)

    def call_opening(self, name: str | None, *, thinking: bool) -> tuple[int, ...]:
        """Return the ids that begin a call; see ``ChatFormat.call_opening``."""
        out = TokenWriter(self._tokenizer)
        if thinking and self._is_4_5:
            self._no_thinking(out)
        elif thinking:
            out.special("</think>")
        out.text(self._break)
        out.special("<tool_call>")
        out.text(name + self._break if name else "")
        return out.finish().token_ids

    def _tools(self, out: TokenWriter, tools: Sequence[ToolSpec]) -> None:
        out.special("<|system|>")
        out.text(_TOOLS_BEFORE)
        for tool in tools:
            function = tool_function(tool)
            described: Json = (
                function if self._is_5_2 else {"type": "function", "function": function}
            )
            out.text(dump_json(described) + "\n")
        out.text(_TOOLS_AFTER)
        for piece in _CALL_EXAMPLE:
            if piece.startswith("<"):
                out.special(piece)
            elif piece != "\n" or self._is_4_5:
                out.text(piece)

    def _messages(
        self,
        out: TokenWriter,
        messages: Sequence[Message],
        *,
        thinking: bool,
        keeps_reasoning: Callable[[int], bool],
        untrained: Collection[int],
    ) -> None:
        previous: Role | None = None
        for index, message in enumerate(messages):
            token = _ROLE_TOKEN[message.role]
            if not (message.role is Role.TOOL and previous is Role.TOOL):
                ends_turn = previous is Role.ASSISTANT and token in _STOP_TOKENS
                out.special(token, trained=ends_turn and index - 1 not in untrained)
            if message.role is Role.ASSISTANT:
                self._assistant(
                    out,
                    message,
                    thinking=thinking,
                    keeps_reasoning=keeps_reasoning(index),
                    trained=index not in untrained,
                )
            elif message.role is Role.TOOL:
                out.text(self._break)
                out.special("<tool_response>")
                out.text(self._break + message.content + self._break)
                out.special("</tool_response>")
            else:
                out.text(self._break + message.content)
                if self._is_4_5 and not thinking and message.role is Role.USER:
                    out.text("" if message.content.endswith(_NO_THINKING) else _NO_THINKING)
            previous = message.role

    def _assistant(
        self,
        out: TokenWriter,
        message: Message,
        *,
        thinking: bool,
        keeps_reasoning: bool,
        trained: bool,
    ) -> None:
        reasoning, content = _split_reasoning(message, trims=not self._is_5_2)
        opens_itself = self._is_4_5 and trained
        if keeps_reasoning and (reasoning or (self._is_5_2 and reasoning is not None)):
            out.text(self._break, trained=opens_itself)
            out.special("<think>", trained=opens_itself)
            out.text(reasoning if self._is_5_2 else reasoning.strip(), trained=trained)
            out.special("</think>", trained=trained)
        else:
            # Reasoning that was dropped is not what the model said there, so it does not learn the empty block.
            self._no_thinking(out, trained=opens_itself and thinking and not reasoning)
        if content.strip():
            out.text(self._break + content.strip(), trained=trained)
        for call in message.tool_calls:
            out.text(self._break, trained=trained)
            _write_call(out, call, line_break=self._break, trained=trained)

    def _generation_prompt(self, out: TokenWriter, *, thinking: bool) -> None:
        out.special("<|assistant|>")
        if not thinking:
            self._no_thinking(out)
        elif not self._is_4_5:
            out.special("<think>")

    def _no_thinking(self, out: TokenWriter, *, trained: bool = False) -> None:
        out.text(self._break, trained=trained)
        if self._is_5_2 or self._is_4_5:
            out.special("<think>", trained=trained)
        out.special("</think>", trained=trained)


def _split_reasoning(message: Message, *, trims: bool) -> tuple[str | None, str]:
    """Return reasoning and content; a message that carries no reasoning may hold it inside its content."""
    if message.reasoning is not None or "</think>" not in message.content:
        return message.reasoning, message.content
    before = message.content.split("</think>")[0]
    after = message.content.split("</think>")[-1]
    if not trims:
        return before.split("<think>")[-1], after
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")


def _write_call(out: TokenWriter, call: ToolCall, *, line_break: str, trained: bool) -> None:
    out.special("<tool_call>", trained=trained)
    out.text(call.name + line_break, trained=trained)
    for key, value in call.arguments.items():
        out.special("<arg_key>", trained=trained)
        out.text(key, trained=trained)
        out.special("</arg_key>", trained=trained)
        out.text(line_break, trained=trained)
        out.special("<arg_value>", trained=trained)
        out.text(value if isinstance(value, str) else dump_json(value), trained=trained)
        out.special("</arg_value>", trained=trained)
        out.text(line_break, trained=trained)
    out.special("</tool_call>", trained=trained)
