"""ChatML, the chat format of SmolLM2, Qwen and many small models, with Qwen's way to call tools.

::

    <|im_start|>system TEXT<|im_end|> <|im_start|>user TEXT<|im_end|> <|im_start|>assistant TEXT<|im_end|>

(each role is followed by a newline, and each ``<|im_end|>`` by one that is not trained). Tool calls are
JSON inside ``<tool_call>`` tags. With thinking the prompt opens ``<think>``. Tags are control tokens
where the vocabulary has them and text where it has not.

Source: the models' own chat templates (wire format, kept verbatim).
"""

import re
from collections.abc import Collection, Sequence
from typing import Final

from longarc.records.message import Json, Message, Role, ToolSpec
from longarc.tokens.arguments import dump_json, tool_function
from longarc.tokens.chat_format import (
    ParsedTurn,
    RenderedChat,
    StoredTurn,
    StreamedTags,
    TokenWriter,
)
from longarc.tokens.tagged_json import parse_tagged
from longarc.tokens.tokenizer import Tokenizer

_TOOLS_BEFORE: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_TAGS: Final = re.compile(r"(</?(?:think|tool_call|tool_response)>)")


class ChatMlFormat:
    """ChatML; see ``ChatFormat`` for what the methods mean."""

    def __init__(self, tokenizer: Tokenizer, *, default_system: str | None = None) -> None:
        """Bind a tokenizer.

        Args:
            tokenizer: it has ``<|im_start|>`` and ``<|im_end|>``.
            default_system: system text of conversations that bring none (models differ in theirs).
        """
        self._tokenizer = tokenizer
        self._default_system = default_system
        self._end_id = tokenizer.special_id("<|im_end|>")
        special = tokenizer.special_tokens
        tokenizer.special_id("<|im_start|>")
        self._tags = (
            frozenset(
                tag
                for name in ("think", "tool_call", "tool_response")
                for tag in (f"<{name}>", f"</{name}>")
            )
            & special.keys()
        )
        others = [special["<|endoftext|>"]] if "<|endoftext|>" in special else []
        self._stop_ids = (self._end_id, *others)

    @property
    def name(self) -> str:
        """Name of the format."""
        return "chatml"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the format writes with."""
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``<|im_end|>``, and ``<|endoftext|>`` where there is one."""
        return self._stop_ids

    @property
    def streamed_tags(self) -> StreamedTags:
        """Tags are text, in vocabularies that have them as control tokens too."""
        return StreamedTags(by_id=False, strips_reasoning=True)

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
        has_system = bool(messages) and messages[0].role is Role.SYSTEM
        self._opening(out, messages[0].content if has_system else self._default_system, tools)
        last_user = max((i for i, m in enumerate(messages) if m.role is Role.USER), default=-1)
        kept_from = last_user + 1 if clear_thinking else 0
        self._messages(
            out, messages, first=int(has_system), kept_from=kept_from, untrained=untrained
        )
        if add_generation_prompt:
            self._generation_prompt(out, thinking=thinking)
        return out.finish()

    def render_tail(
        self, messages: Sequence[Message], *, previous_stop_id: int | None, thinking: bool
    ) -> tuple[int, ...]:
        """Render what follows a stored assistant turn, with the opening of the next one.

        Args:
            messages: the messages after the stored turn.
            previous_stop_id: last id of the stored turn if it is a stop id, None if it was cut off.
            thinking: as in ``render``.
        """
        out = TokenWriter(self._tokenizer)
        if previous_stop_id != self._end_id:
            out.special("<|im_end|>")
        out.text("\n")
        self._messages(out, messages, first=0, kept_from=0, untrained=())
        self._generation_prompt(out, thinking=thinking)
        return out.finish().token_ids

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
        text = self._tokenizer.decode(body, keep_special=True)
        return parse_tagged(text, prompt_opens_thinking=thinking, call_id_prefix=call_id_prefix)

    def call_opening(self, name: str | None, *, thinking: bool) -> tuple[int, ...]:
        """Return the ids that begin a call; see ``ChatFormat.call_opening``."""
        out = TokenWriter(self._tokenizer)
        if thinking:
            self._tagged(out, "\n</think>\n\n")
        self._tagged(out, "<tool_call>")
        out.text('\n{"name": ')
        out.text('"' if name is None else f'{dump_json(name)}, "arguments": ')
        return out.finish().token_ids

    def _opening(self, out: TokenWriter, system: str | None, tools: Sequence[ToolSpec]) -> None:
        if system is None and not tools:
            return
        out.special("<|im_start|>")
        out.text("system\n" + (system or ""))
        if tools:
            out.text(("\n\n" if system else "") + _TOOLS_BEFORE)
            for tool in tools:
                out.text("\n" + dump_json({"type": "function", "function": tool_function(tool)}))
            self._tagged(out, _TOOLS_AFTER)
        out.special("<|im_end|>")
        out.text("\n")

    def _messages(
        self,
        out: TokenWriter,
        messages: Sequence[Message],
        *,
        first: int,
        kept_from: int,
        untrained: Collection[int],
    ) -> None:
        for index in range(first, len(messages)):
            message = messages[index]
            if message.role is Role.TOOL:
                follows_tool = index > first and messages[index - 1].role is Role.TOOL
                self._tool(out, message, opens=not follows_tool)
                if index + 1 < len(messages) and messages[index + 1].role is Role.TOOL:
                    continue
            else:
                out.special("<|im_start|>")
                out.text(f"{message.role.value}\n")
                if message.role is not Role.ASSISTANT:
                    out.text(message.content)
            trained = message.role is Role.ASSISTANT and index not in untrained
            if message.role is Role.ASSISTANT:
                self._assistant(out, message, keeps_reasoning=index >= kept_from, trained=trained)
            out.special("<|im_end|>", trained=trained)
            out.text("\n")

    def _assistant(
        self, out: TokenWriter, message: Message, *, keeps_reasoning: bool, trained: bool
    ) -> None:
        if keeps_reasoning and message.reasoning:
            self._tagged(out, "<think>\n")
            out.text(message.reasoning, trained=trained)
            self._tagged(out, "\n</think>\n\n", trained=trained)
        out.text(message.content, trained=trained)
        for index, call in enumerate(message.tool_calls):
            if index or message.content:
                out.text("\n", trained=trained)
            self._tagged(out, "<tool_call>", trained=trained)
            body: Json = {"name": call.name, "arguments": call.arguments}
            out.text(f"\n{dump_json(body)}\n", trained=trained)
            self._tagged(out, "</tool_call>", trained=trained)

    def _tool(self, out: TokenWriter, message: Message, *, opens: bool) -> None:
        if opens:
            out.special("<|im_start|>")
            out.text("user")
        self._tagged(out, "\n<tool_response>")
        out.text(f"\n{message.content}\n")
        self._tagged(out, "</tool_response>")

    def _generation_prompt(self, out: TokenWriter, *, thinking: bool) -> None:
        out.special("<|im_start|>")
        out.text("assistant\n")
        if thinking:
            self._tagged(out, "<think>\n")

    def _tagged(self, out: TokenWriter, text: str, *, trained: bool = False) -> None:
        """Write our own text, its tags as control tokens where the vocabulary has them."""
        for piece in _TAGS.split(text):
            if piece in self._tags:
                out.special(piece, trained=trained)
            elif piece:
                out.text(piece, trained=trained)
