"""A Renderer of the ``renderers`` package as a chat format.

The package is not imported: what has its four methods is a Renderer. Its contract is that a bridge begins with the
ids that were stored, which is verified at every call; where it does not, or where the Renderer gives no bridge, the
conversation is rendered whole as a new branch.

The text of messages is encoded as the package does it: a message that spells a control token places one. The formats
of LongArc itself do not let it.

Source: renderers 0.1.12, ``renderers.base`` (names of methods and fields).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, runtime_checkable

from longarc.errors import ConfigError, boundary
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import call_from_json, tool_function
from longarc.tokens.chat_format import ParsedTurn, RenderedChat, Rewrites, StoredTurn
from longarc.tokens.tokenizer import Tokenizer

_READ: Final = frozenset({"ok", "unknown_tool"})
"""Statuses of calls that can be handed on; whether there is such a tool, the agent loop finds out."""


@runtime_checkable
class Renderer(Protocol):
    """What is used of a Renderer. Its records are read by the names of their fields."""

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Any:
        """Return ``token_ids``, ``message_indices`` and ``sampled_mask`` of a conversation."""
        ...

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> Any:
        """Return ``content``, ``reasoning_content`` and ``tool_calls`` of a completion."""
        ...

    def get_stop_token_ids(self) -> list[int]:
        """Return what ends a turn."""
        ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """Return the next prompt, which begins with the previous ids; None where that cannot be."""
        ...


class RendererTokenizer:
    """A tokenizer as Renderers want one: the surface of Hugging Face's that they use."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.special_tokens.get("<|endoftext|>")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; control tokens are read."""
        return self._tokenizer.encode_with_control(text)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any
    ) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(list(token_ids), keep_special=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the ids of control tokens; None for others."""
        special = self._tokenizer.special_tokens
        if isinstance(tokens, str):
            return special.get(tokens)
        return [special.get(token) for token in tokens]


class RendererFormat:
    """A Renderer as ``ChatFormat``; see there for what the methods mean."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer) -> None:
        """Wrap a Renderer.

        Args:
            tokenizer: of the same vocabulary as the Renderer's.
            renderer: where its ``config`` has ``enable_thinking`` or ``clear_thinking``, another Renderer of its
                class is made for each value that is asked for; one whose ``thinking_retention`` is left open keeps
                reasoning where the session does.
        """
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._variants: dict[tuple[bool, bool], Renderer] = {}
        self._stop_ids = tuple(dict.fromkeys(renderer.get_stop_token_ids()))
        self.rewrites = Rewrites(self.name)
        """Turns that the Renderer did not continue."""

    @property
    def name(self) -> str:
        """Name of the Renderer's class."""
        kind = type(self._renderer)
        return f"{kind.__module__}:{kind.__qualname__}"

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the format writes with."""
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What the Renderer says ends a turn."""
        return self._stop_ids

    @property
    def streamed_tags(self) -> None:
        """None: a Renderer reads whole completions."""
        return None

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
        """Render a whole conversation; see ``ChatFormat.render``.

        Raises:
            ConfigError: the Renderer refuses it, or does not say which tokens are sampled.
        """
        renderer = self._variant(thinking=thinking, clear_thinking=clear_thinking)
        wire, wire_tools = _wire(messages, messages), _wire_tools(tools)
        with boundary(ConfigError, f"{self.name} refuses this conversation"):
            rendered = renderer.render(
                wire, tools=wire_tools, add_generation_prompt=add_generation_prompt
            )
        ids = list(rendered.token_ids)
        if not rendered.sampled_mask and not add_generation_prompt:
            raise ConfigError(
                f"{self.name} does not say which tokens are sampled (its sampled_mask is empty), so nothing could be "
                f"trained on its conversations; use a Renderer of the model's family"
            )
        owners = {
            i
            for i, message in enumerate(messages)
            if message.role is Role.ASSISTANT and i not in untrained
        }
        mask = [
            sampled and owner in owners
            for sampled, owner in zip(
                rendered.sampled_mask or [False] * len(ids), rendered.message_indices, strict=True
            )
        ]
        if not add_generation_prompt and messages and messages[-1].role is Role.ASSISTANT:
            end = self._end_of_turn(renderer, messages[-1], wire_tools, ids)
            ids += end
            mask += [len(messages) - 1 in owners] * len(end)
        return RenderedChat(token_ids=tuple(ids), train_mask=tuple(mask))

    def tail_after(
        self, turn: StoredTurn, messages: Sequence[Message], *, thinking: bool
    ) -> tuple[int, ...] | None:
        """Render what follows a stored turn, by the Renderer's bridge; None where it builds none."""
        renderer = self._variant(thinking=thinking, clear_thinking=turn.clear_thinking)
        stored = [*turn.prompt_ids, *turn.sampled_ids]
        with boundary(ConfigError, f"{self.name} refuses to go on with this conversation"):
            bridge = renderer.bridge_to_next_turn(
                list(turn.prompt_ids),
                list(turn.sampled_ids),
                _wire(messages, [*turn.messages, *messages]),
                tools=_wire_tools(turn.tools),
            )
        if bridge is None:
            self.rewrites.add("the Renderer gives no bridge")
            return None
        ids = list(bridge.token_ids)
        if ids[: len(stored)] != stored:
            self.rewrites.add("the Renderer's bridge does not begin with the stored ids")
            return None
        return tuple(ids[len(stored) :])

    def call_opening(self, name: str | None, *, thinking: bool) -> None:
        """Return None: a Renderer does not say how a call begins."""

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool,
        call_id_prefix: str = "call",
    ) -> ParsedTurn:
        """Read a completion; see ``ChatFormat.parse``."""
        renderer = self._variant(thinking=thinking, clear_thinking=False)
        with boundary(ConfigError, f"{self.name} cannot read a completion"):
            parsed = renderer.parse_response(list(token_ids), tools=_wire_tools(tools))
        calls = tuple(
            _call(call, f"{call_id_prefix}_{index}") for index, call in enumerate(parsed.tool_calls)
        )
        problems = [
            f"tool call {i} ({c.name!r}): {c.error}" for i, c in enumerate(calls) if c.error
        ]
        message = Message(
            role=Role.ASSISTANT,
            content=str(parsed.content or "").strip(),
            reasoning=parsed.reasoning_content or None,
            tool_calls=calls,
        )
        return ParsedTurn(message=message, problems=tuple(problems))

    def _variant(self, *, thinking: bool, clear_thinking: bool) -> Renderer:
        """Return the Renderer for two settings that Renderers fix when they are made."""
        known = self._variants.get((thinking, clear_thinking))
        if known is not None:
            return known
        config = getattr(self._renderer, "config", None)
        wanted: dict[str, object] = {
            "enable_thinking": thinking,
            "clear_thinking": clear_thinking,
        }
        is_open = getattr(config, "thinking_retention", "all") is None
        if is_open and not clear_thinking and not hasattr(config, "clear_thinking"):
            # Renderers of families whose template always forgets go on across questions when told to, and only then.
            wanted["thinking_retention"] = "all"
        changed = {
            name: value
            for name, value in wanted.items()
            if hasattr(config, name) and getattr(config, name) != value
        }
        variant = self._renderer
        if config is not None and changed:
            kind: Any = type(self._renderer)
            with boundary(ConfigError, f"{self.name} cannot be made with {changed}"):
                variant = kind(
                    RendererTokenizer(self._tokenizer), config.model_copy(update=changed)
                )
        self._variants[thinking, clear_thinking] = variant
        return variant

    def _end_of_turn(
        self, renderer: Renderer, last: Message, tools: list[Any] | None, ids: list[int]
    ) -> list[int]:
        """Return the id that ends the last answer, where only the next message would bring it."""
        if any(token_id in self._stop_ids for token_id in ids[-2:]):
            return []
        # A conversation of its own, in which no later question makes the Renderer forget anything.
        question = Message(role=Role.USER, content="q")
        calls = last.tool_calls
        reply = Message(
            role=Role.TOOL if calls else Role.USER,
            content="",
            tool_call_id=calls[0].id if calls else None,
        )
        short = [question, replace(last, reasoning=None)]
        with boundary(ConfigError, f"{self.name} refuses this conversation"):
            before, after = (
                list(renderer.render(_wire(conversation, short), tools=tools).token_ids)
                for conversation in (short, [*short, reply])
            )
        return [i for i in after[len(before) : len(before) + 1] if i in self._stop_ids]


def _wire(messages: Sequence[Message], history: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of chat completions; ``history`` tells what tools the results are of."""
    names = {call.id: call.name for message in history for call in message.tool_calls}
    return [_wire_message(message, names) for message in messages]


def _wire_message(message: Message, call_names: Mapping[str, str]) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
        wire["name"] = call_names.get(message.tool_call_id, "")
    return wire


def _wire_tools(tools: Sequence[ToolSpec]) -> list[Any] | None:
    return [{"type": "function", "function": tool_function(tool)} for tool in tools] or None


def _call(parsed: Any, call_id: str) -> ToolCall:
    name = str(parsed.name or "")
    if str(parsed.status) not in _READ:
        reason = f"the call cannot be read ({parsed.status}): {parsed.raw!r}"
        return ToolCall(id=call_id, name=name, arguments={}, error=reason)
    arguments = parsed.arguments
    if isinstance(arguments, Mapping):
        return ToolCall(id=call_id, name=name, arguments=arguments)
    return call_from_json(call_id, name, str(arguments or ""))
