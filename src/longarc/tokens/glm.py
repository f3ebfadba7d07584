"""The chat format of GLM-4.7, GLM-5 and GLM-5.2, at token level.

::

    [gMASK]<sop> <|system|>TOOLS <|system|>TEXT <|user|>TEXT <|assistant|><think>R</think>TEXT<tool_call>..</tool_call>
        <|observation|><tool_response>TEXT</tool_response> <|assistant|><think>
                                                                       ^ sampling starts here

There is no end-of-turn token: an assistant's turn ends where it samples the role token that opens the
next turn, so that token belongs to the assistant and is trained. ``<|assistant|>`` and the ``<think>``
(or lone ``</think>``) behind it come from the prompt and are not.

Source: the models' own chat templates (wire format, kept verbatim).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal, TypeAlias

from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import dump_json, tool_function
from longarc.tokens.chat_format import ParsedTurn, RenderedChat, StreamedTags, TokenWriter
from longarc.tokens.glm_parse import GlmParser
from longarc.tokens.tokenizer import Tokenizer

GlmVersion: TypeAlias = Literal["glm-4.7", "glm-5.2"]
"""``glm-4.7`` is also the format of GLM-5."""

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
    "<tool_call>", "{function-name}", "<arg_key>", "{arg-key-1}", "</arg_key>", "<arg_value>",
    "{arg-value-1}", "</arg_value>", "<arg_key>", "{arg-key-2}", "</arg_key>", "<arg_value>",
    "{arg-value-2}", "</arg_value>", "...", "</tool_call>",
)  # fmt: skip


class GlmFormat:
    """GLM's chat format; see ``ChatFormat`` for what the methods mean."""

    def __init__(self, tokenizer: Tokenizer, *, version: GlmVersion = "glm-4.7") -> None:
        self._tokenizer = tokenizer
        self._is_5_2 = version == "glm-5.2"
        self._version = version
        self._parser = GlmParser(tokenizer, strips_reasoning=not self._is_5_2)
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
        return StreamedTags(by_id=True, strips_reasoning=not self._is_5_2)

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
        """Render what follows a stored assistant turn; see ``ChatFormat.render_tail``."""
        out = TokenWriter(self._tokenizer)
        self._messages(out, messages, keeps_reasoning=lambda _: True, untrained=())
        self._generation_prompt(out, thinking=thinking)
        ids = out.finish().token_ids
        return ids[1:] if ids[0] == previous_stop_id else ids

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
        if thinking:
            out.special("</think>")
        out.special("<tool_call>")
        out.text(name or "")
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
            else:
                out.text(piece)

    def _messages(
        self,
        out: TokenWriter,
        messages: Sequence[Message],
        *,
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
                    keeps_reasoning=keeps_reasoning(index),
                    trained=index not in untrained,
                )
            elif message.role is Role.TOOL:
                out.special("<tool_response>")
                out.text(message.content)
                out.special("</tool_response>")
            else:
                out.text(message.content)
            previous = message.role

    def _assistant(
        self, out: TokenWriter, message: Message, *, keeps_reasoning: bool, trained: bool
    ) -> None:
        reasoning, content = _split_reasoning(message, trims=not self._is_5_2)
        if keeps_reasoning and (reasoning or (self._is_5_2 and reasoning is not None)):
            out.special("<think>")
            out.text(reasoning if self._is_5_2 else reasoning.strip(), trained=trained)
            out.special("</think>", trained=trained)
        else:
            self._no_thinking(out)
        out.text(content.strip(), trained=trained)
        for call in message.tool_calls:
            _write_call(out, call, trained=trained)

    def _generation_prompt(self, out: TokenWriter, *, thinking: bool) -> None:
        out.special("<|assistant|>")
        if thinking:
            out.special("<think>")
        else:
            self._no_thinking(out)

    def _no_thinking(self, out: TokenWriter) -> None:
        if self._is_5_2:
            out.special("<think>")
        out.special("</think>")


def _split_reasoning(message: Message, *, trims: bool) -> tuple[str | None, str]:
    """Return reasoning and content; a message that carries no reasoning may hold it inside its content."""
    if message.reasoning is not None or "</think>" not in message.content:
        return message.reasoning, message.content
    before = message.content.split("</think>")[0]
    after = message.content.split("</think>")[-1]
    if not trims:
        return before.split("<think>")[-1], after
    return before.rstrip("\n").split("<think>")[-1].lstrip("\n"), after.lstrip("\n")


def _write_call(out: TokenWriter, call: ToolCall, *, trained: bool) -> None:
    out.special("<tool_call>", trained=trained)
    out.text(call.name, trained=trained)
    for key, value in call.arguments.items():
        out.special("<arg_key>", trained=trained)
        out.text(key, trained=trained)
        out.special("</arg_key>", trained=trained)
        out.special("<arg_value>", trained=trained)
        out.text(value if isinstance(value, str) else dump_json(value), trained=trained)
        out.special("</arg_value>", trained=trained)
    out.special("</tool_call>", trained=trained)
