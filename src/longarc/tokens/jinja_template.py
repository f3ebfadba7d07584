"""A chat template in Jinja, as checkpoints bring one: from a conversation to text, in a sandbox.

A template is a program from somebody else. It runs in Jinja's immutable sandbox: it reaches no attribute, file or
module, but nothing keeps it from wasting time.

Templates write control tokens and text alike, as characters. What stood in a message must not become a control token
all the same, so spellings of control tokens in messages and tools carry a mark through the template, by which
``plain`` knows them again.

::

    message "<|user|>" --marked--> "<M|user|>" --template--> "<|user|>\\n<M|user|>" --control, plain--> token, text

Source: the variables and functions that Hugging Face's transformers gives to templates (wire format).
"""

import datetime
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longarc.errors import ConfigError, boundary
from longarc.records.message import Json, Message, Role, ToolSpec
from longarc.tokens.arguments import tool_function

# Noncharacters: Unicode promises that no text has a use for them. Where data holds one all the same, it is marked too.
_OPENS, _CLOSES, _MARK = "\ufdd0", "\ufdd1", "\ufdd2"
_STAND_INS: Final = {_OPENS: "\ufde0", _CLOSES: "\ufde1", _MARK: "\ufde2"}
_MARKED: Final = re.compile(_MARK + "([\ufde0-\ufde2])?")
_MARKED_IN_ASCII: Final = re.compile(r"\\u(fdd2|fde[0-2])")
_ORIGINALS: Final = {stand_in: original for original, stand_in in _STAND_INS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateText:
    """What a template wrote."""

    text: str
    """With marks: control tokens that are not marked are the template's own."""
    generated: tuple[tuple[int, int], ...]
    """[start, end) of each ``{% generation %}`` block in the text; empty where the template has none."""


class ChatTemplate:
    """A compiled template."""

    def __init__(
        self,
        source: str,
        *,
        control_tokens: Collection[str],
        special_tokens: Mapping[str, str] | None = None,
        values: Mapping[str, Json] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        """Compile.

        Args:
            source: the template.
            control_tokens: spellings of the tokenizer's control tokens.
            special_tokens: ``bos_token``, ``eos_token`` and the like, which templates write by name.
            values: further variables of the template.
            date: what ``strftime_now`` tells, at midnight. None leaves that function undefined; many templates have
                a date of their own for that case.

        Raises:
            ConfigError: the template is not Jinja.
        """
        self.source = source
        self._control_tokens = tuple(sorted(control_tokens, key=len, reverse=True))
        self.control = re.compile("|".join(map(re.escape, self._control_tokens)) or r"(?!)")
        """Finds the control tokens that the template wrote itself."""
        self._to_mark = re.compile(f"{self.control.pattern}|[{_OPENS}{_CLOSES}{_MARK}]")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        if date is not None:
            midnight = datetime.datetime.combine(date, datetime.time())
            environment.globals["strftime_now"] = midnight.strftime
        with boundary(ConfigError, "the chat template is not Jinja"):
            self._template = environment.from_string(source)
        self._variables = {**(special_tokens or {}), **(values or {})}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool,
        clear_thinking: bool,
        add_generation_prompt: bool,
    ) -> TemplateText:
        """Write a conversation; see ``ChatFormat.render``.

        Raises:
            ConfigError: the template refuses it, or fails on it.
        """
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        with boundary(ConfigError, "the chat template refuses this conversation"):
            text = self._template.render(
                # The recipe's own values come last, and win.
                {
                    "messages": [self._wire(message, names) for message in messages],
                    "tools": [self._wire_tool(tool) for tool in tools] or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    "enable_thinking": thinking,
                    "thinking": thinking,
                    "clear_thinking": clear_thinking,
                    **self._variables,
                }
            )
        return _without_block_marks(text)

    def marked(self, text: str) -> str:
        """Return a text as it stands in what the template wrote."""
        return self._to_mark.sub(_mark, text)

    def plain(self, text: str) -> str:
        """Return the text without marks."""
        return _MARKED.sub(_original, text) if _MARK in text else text

    def _wire(self, message: Message, call_names: Mapping[str, str]) -> dict[str, Any]:
        content, reasoning = message.content, message.reasoning
        if (
            message.role is Role.ASSISTANT
            and reasoning is None
            and "</think>" in content
            and "</think>" in self.source
        ):
            # Such templates take reasoning out of the content; they would not find it once it is marked.
            before, _, content = content.rpartition("</think>")
            reasoning = before.rpartition("<think>")[2].strip("\n")
            content = content.lstrip("\n")
        wire: dict[str, Any] = {"role": message.role.value, "content": self.marked(content)}
        if reasoning is not None:
            wire["reasoning_content"] = self.marked(reasoning)
        if message.tool_calls:
            wire["tool_calls"] = [
                {
                    "id": self.marked(call.id),
                    "type": "function",
                    "function": {
                        "name": self.marked(call.name),
                        "arguments": self._marked_json(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            wire["tool_call_id"] = self.marked(message.tool_call_id)
            wire["name"] = self.marked(call_names.get(message.tool_call_id, ""))
        return wire

    def _wire_tool(self, tool: ToolSpec) -> Json:
        return self._marked_json({"type": "function", "function": tool_function(tool)})

    def _marked_json(self, value: Json) -> Json:
        if isinstance(value, str):
            return self.marked(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self._marked_json(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._marked_json(item) for item in value]
        return value


def _mark(match: "re.Match[str]") -> str:
    found = match.group()
    if found in _STAND_INS:
        return _MARK + _STAND_INS[found]
    return found[0] + _MARK + found[1:]


def _original(match: "re.Match[str]") -> str:
    return _ORIGINALS.get(match.group(1), "")


def _without_block_marks(text: str) -> TemplateText:
    pieces: list[str] = []
    generated: list[tuple[int, int]] = []
    length = start = 0
    for piece in re.split(f"([{_OPENS}{_CLOSES}])", text):
        if piece == _OPENS:
            start = length
        elif piece == _CLOSES:
            generated.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return TemplateText(text="".join(pieces), generated=tuple(generated))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _MARKED_IN_ASCII.sub(lambda m: chr(int(m[1], 16)), text) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """``{% generation %}``: a block of what the model says itself."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Read one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_between_marks")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _between_marks(self, caller: Callable[[], str]) -> str:
        return _OPENS + caller() + _CLOSES
