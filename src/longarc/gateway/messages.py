"""Anthropic Messages, the wire format: a body to a request, and answers to JSON or events.

Thinking blocks carry a signature that clients send back with them. It is a digest of the text, told for
the protocol's sake: what decides whether an answer comes back unchanged is its text.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, ValidationError

from longarc.gateway.answers import Answer
from longarc.gateway.dialect import (
    MALFORMED,
    ChatRequest,
    NamedTool,
    Surroundings,
    ToolChoice,
    Wire,
    check_extra,
    checked_stop,
    event,
    refusal,
)
from longarc.gateway.streaming import Delta, DeltaKind
from longarc.gateway.turn_options import TurnStart
from longarc.gateway.wire import WireError, unsupported
from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import dump_json

_ID_HERE: Final = "toolu_"
_ID_THERE: Final = "call_"
"""How the ids of calls begin in this dialect, and in sessions."""


class _Text(Wire):
    type: Literal["text"]
    text: str


class _ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _RedactedThinking(Wire):
    type: Literal["redacted_thinking"]
    data: str


class _ToolUse(Wire):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Wire):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[_Text, Field()]] | None = None
    is_error: bool | None = None


_UserBlock = Annotated[_Text | _ToolResult, Field(discriminator="type")]
_AssistantBlock = Annotated[
    _Text | _ThinkingBlock | _RedactedThinking | _ToolUse, Field(discriminator="type")
]


class _UserMessage(Wire):
    role: Literal["user"]
    content: str | list[_UserBlock]


class _AssistantMessage(Wire):
    role: Literal["assistant"]
    content: str | list[_AssistantBlock]


class _SystemMessage(Wire):
    role: Literal["system"]
    content: str | list[_Text]


_Message: TypeAlias = Annotated[
    _UserMessage | _AssistantMessage | _SystemMessage, Field(discriminator="role")
]


class _Tool(Wire):
    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _AnyChoice(Wire):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class _ToolNamed(Wire):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class _ThinkingOn(Wire):
    type: Literal["enabled"]
    budget_tokens: int | None = Field(None, ge=1)


class _ThinkingOther(Wire):
    type: Literal["disabled", "adaptive"]


class _SchemaFormat(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Wire):
    model_config = ConfigDict(frozen=True, extra="allow")

    effort: str | None = None
    format: _SchemaFormat | None = None


class _ContextManagement(Wire):
    edits: list[Any] | None = None


class CountTokensBody(Wire):
    """The body of a request for the number of prompt tokens."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    messages: list[_Message] = Field(min_length=1)
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Annotated[_AnyChoice | _ToolNamed, Field(discriminator="type")] | None = None
    thinking: Annotated[_ThinkingOn | _ThinkingOther, Field(discriminator="type")] | None = None
    output_config: _OutputConfig | None = None
    context_management: _ContextManagement | None = None


class MessagesBody(CountTokensBody):
    """The body of a request."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_WITHOUT_EFFECT: Final = frozenset(
    ("metadata", "service_tier", "cache_control", "inference_geo", "anthropic_beta", "betas")
)
_ONLY: Final[dict[str, tuple[object, ...]]] = {"mcp_servers": ([],), "speed": ("standard",)}
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class Messages:
    """The dialect; satisfies ``Dialect``."""

    name = "a Messages request"

    def read(self, body: bytes, around: Surroundings) -> "MessagesExchange":
        """Understand a request; see ``Dialect.read``."""
        try:
            asked = MessagesBody.model_validate_json(body)
        except ValidationError as error:
            raise refusal(error, body, self.name) from None
        choice = asked.tool_choice
        return MessagesExchange(
            request=ChatRequest(
                **_common(asked),
                one_call=choice is not None and bool(choice.disable_parallel_tool_use),
                max_new_tokens=asked.max_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                stop=checked_stop(asked.stop_sequences or (), "stop_sequences"),
                streams=bool(asked.stream),
                json_schema=_json_schema(asked.output_config),
            ),
            around=around,
            response_id=around.new_id("msg_"),
            manages_context=asked.context_management is not None,
        )

    def read_count(self, body: bytes) -> ChatRequest:
        """Understand a request for the number of prompt tokens.

        Raises:
            WireError: 400, naming the field that is wrong.
        """
        try:
            asked = CountTokensBody.model_validate_json(body)
        except ValidationError as error:
            raise refusal(error, body, "a count_tokens request") from None
        return ChatRequest(**_common(asked))

    def error(self, error: WireError) -> dict[str, Any]:
        """Return an error's body."""
        message = error.message
        if error.code == "context_length_exceeded":
            # Claude Code compacts when it reads these words.
            message = f"prompt is too long: {message}"
        kind = _KINDS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


@dataclass(slots=True, kw_only=True)
class MessagesExchange:
    """The codec of one request; satisfies ``Exchange``."""

    request: ChatRequest
    around: Surroundings
    response_id: str
    manages_context: bool
    _open: DeltaKind | None = None
    """Kind of the block that is being told."""
    _index: int = -1
    _thought: list[str] = field(default_factory=list)
    """Of the thinking block that is being told."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response."""
        (answer,) = answers
        message = answer.turn.message
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append(
                {
                    "type": "thinking",
                    "thinking": message.reasoning,
                    "signature": _signature(message.reasoning),
                }
            )
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        blocks += [_tool_use(call) for call in message.tool_calls]
        return self._message(blocks, self._ending(answer), _usage(answer))

    def opening(self, start: TurnStart) -> bytes:
        """Return the start of a message."""
        message = self._message(
            [],
            {"stop_reason": None, "stop_sequence": None},
            {"input_tokens": start.num_prompt_tokens, "output_tokens": 0},
        )
        return _event({"type": "message_start", "message": message}) + self.ping()

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Return the events of a delta, those that begin and end blocks included."""
        if delta.call is not None:
            block = _tool_use(delta.call)
            written, block["input"] = dump_json(block["input"]), {}
            return (
                self._stop()
                + self._start(DeltaKind.CALL, block)
                + self._delta({"type": "input_json_delta", "partial_json": written})
                + self._stop()
            )
        is_thinking = delta.kind is DeltaKind.REASONING
        out = b""
        if self._open is not delta.kind:
            empty: dict[str, Any] = (
                {"type": "thinking", "thinking": "", "signature": ""}
                if is_thinking
                else {"type": "text", "text": ""}
            )
            out = self._stop() + self._start(delta.kind, empty)
        if is_thinking:
            self._thought.append(delta.text)
            return out + self._delta({"type": "thinking_delta", "thinking": delta.text})
        return out + self._delta({"type": "text_delta", "text": delta.text})

    def ping(self) -> bytes:
        """Return the dialect's own ping."""
        return _event({"type": "ping"})

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """Return the end of the last block, the reason, the usage and the end of the message."""
        (answer,) = answers
        told = {
            "type": "message_delta",
            "delta": self._ending(answer),
            "usage": _usage(answer),
        } | self._managed()
        return self._stop() + _event(told) + _event({"type": "message_stop"})

    def failure(self, error: WireError) -> bytes:
        """Return the error event."""
        return _event(Messages().error(error))

    def _message(
        self, blocks: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": blocks,
            **ending,
            "usage": {
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            }
            | usage,
        } | self._managed()

    def _managed(self) -> dict[str, Any]:
        return {"context_management": {"applied_edits": []}} if self.manages_context else {}

    def _ending(self, answer: Answer) -> dict[str, Any]:
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        reason = reasons[answer.turn.finish_reason]
        if answer.stop is not None and reason == "end_turn":
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
        return {"stop_reason": reason, "stop_sequence": None}

    def _start(self, kind: DeltaKind, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        """End the block that is open, a thinking block with its signature."""
        if self._open is None:
            return b""
        out = b""
        if self._open is DeltaKind.REASONING:
            signature = _signature("".join(self._thought))
            out = self._delta({"type": "signature_delta", "signature": signature})
            self._thought.clear()
        self._open = None
        return out + _event({"type": "content_block_stop", "index": self._index})


def model_card(name: str) -> dict[str, Any]:
    """Return a model as the dialect's model list tells it."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _event(data: dict[str, Any]) -> bytes:
    return event(data, name=data["type"])


def _common(asked: CountTokensBody) -> dict[str, Any]:
    """Return what decides the prompt."""
    _check_context_management(asked.context_management)
    check_extra(asked.model_extra, without_effect=_WITHOUT_EFFECT, only=_ONLY)
    messages: list[Message] = []
    if system := _system(asked.system):
        messages.append(Message(role=Role.SYSTEM, content=system))
    for message in asked.messages:
        messages += _messages(message)
    messages = _joined(messages)
    if messages[-1].role is Role.ASSISTANT:
        raise WireError(
            400,
            "messages: the last message is the assistant's; this gateway does not continue an answer that the "
            "client began. End with a user message",
            param="messages",
        )
    return {
        "model": asked.model,
        "messages": tuple(messages),
        "tools": tuple(
            _tool(tool, i) for i, tool in enumerate(asked.tools or ()) if _is_seen(tool)
        ),
        "tool_choice": _tool_choice(asked.tool_choice),
        "thinking": _thinking(asked.thinking),
    }


def _check_context_management(wanted: _ContextManagement | None) -> None:
    """Accept what asks for the context as it is, which is what the gateway always keeps."""
    for edit in (wanted and wanted.edits) or ():
        kind = edit.get("type") if isinstance(edit, dict) else edit
        keep = edit.get("keep") if isinstance(edit, dict) else None
        if not (isinstance(kind, str) and kind.startswith("clear_thinking") and keep == "all"):
            raise unsupported(
                "context_management.edits",
                edit,
                "the context is what the client sends: edit it there, or send clear_thinking with keep='all'",
            )


def _system(system: "str | list[_Text] | None") -> str:
    blocks = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "\n\n".join(blocks)


def _text(content: "str | Sequence[_Text] | None") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


def _messages(message: "_UserMessage | _AssistantMessage | _SystemMessage") -> list[Message]:
    if isinstance(message, _AssistantMessage):
        return [_assistant(message)]
    if isinstance(message, _SystemMessage):
        return [Message(role=Role.SYSTEM, content=_text(message.content))]
    if isinstance(message.content, str):
        return [Message(role=Role.USER, content=message.content)]
    out = [
        Message(
            role=Role.TOOL,
            content=_text(block.content),
            tool_call_id=_session_id_of(block.tool_use_id),
        )
        for block in message.content
        if isinstance(block, _ToolResult)
    ]
    texts = [block.text for block in message.content if isinstance(block, _Text)]
    if texts or not out:
        out.append(Message(role=Role.USER, content="".join(texts)))
    return out


def _assistant(message: _AssistantMessage) -> Message:
    if isinstance(message.content, str):
        return Message(role=Role.ASSISTANT, content=message.content)
    blocks = message.content
    return Message(
        role=Role.ASSISTANT,
        content="".join(block.text for block in blocks if isinstance(block, _Text)),
        # Redacted thinking is not ours: this gateway redacts nothing.
        reasoning="".join(b.thinking for b in blocks if isinstance(b, _ThinkingBlock)) or None,
        tool_calls=tuple(_call(block) for block in blocks if isinstance(block, _ToolUse)),
    )


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join neighbouring messages of the assistant: clients split one answer into several and merge them again."""
    joined: list[Message] = []
    for message in messages:
        if message.role is Role.ASSISTANT and joined and joined[-1].role is Role.ASSISTANT:
            before = joined.pop()
            message = Message(
                role=Role.ASSISTANT,
                content=before.content + message.content,
                reasoning=(before.reasoning or "") + (message.reasoning or "") or None,
                tool_calls=before.tool_calls + message.tool_calls,
            )
        joined.append(message)
    return joined


def _call(block: _ToolUse) -> ToolCall:
    call_id = _session_id_of(block.id)
    if block.name.startswith(MALFORMED):
        reason = str(block.input.get("error", "the call could not be read"))
        name = block.name.removeprefix(MALFORMED)
        return ToolCall(id=call_id, name=name, arguments={}, error=reason)
    return ToolCall(id=call_id, name=block.name, arguments=block.input)


def _session_id_of(call_id: str) -> str:
    if call_id.startswith(_ID_HERE):
        return _ID_THERE + call_id.removeprefix(_ID_HERE)
    return call_id


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return a call; one that cannot be read gets the name of no tool, so that no client runs it."""
    call_id = _ID_HERE + call.id.removeprefix(_ID_THERE)
    if call.error is None:
        return {"type": "tool_use", "id": call_id, "name": call.name, "input": call.arguments}
    return {
        "type": "tool_use",
        "id": call_id,
        "name": MALFORMED + call.name,
        "input": {"error": call.error},
    }


def _is_seen(tool: _Tool) -> bool:
    """Whether the model is told of a tool; those that Anthropic's own servers run are left out."""
    kind = tool.type or "custom"
    return not kind.startswith(("web_search_", "web_fetch_", "code_execution_", "tool_search_"))


def _tool(tool: _Tool, index: int) -> ToolSpec:
    if tool.input_schema is None:
        raise unsupported(
            f"tools[{index}].type",
            tool.type,
            "a tool needs an input_schema here, because the model learns of it from the prompt",
        )
    parameters: dict[str, Json] = tool.input_schema
    return ToolSpec(name=tool.name, description=tool.description or "", parameters=parameters)


def _tool_choice(choice: "_AnyChoice | _ToolNamed | None") -> ToolChoice:
    if choice is None:
        return "auto"
    if isinstance(choice, _ToolNamed):
        return NamedTool(choice.name)
    return "required" if choice.type == "any" else choice.type


def _thinking(thinking: "_ThinkingOn | _ThinkingOther | None") -> bool | None:
    if thinking is None or thinking.type == "adaptive":
        return None
    return thinking.type == "enabled"


def _json_schema(config: _OutputConfig | None) -> str | None:
    if config is None:
        return None
    check_extra(config.model_extra, without_effect=(), only={})
    return None if config.format is None else dump_json(config.format.schema_)


def _signature(reasoning: str) -> str:
    digest = hashlib.blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=48).digest()
    return base64.b64encode(digest).decode()


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.turn.num_prompt_tokens,
        "output_tokens": answer.turn.num_sampled_tokens,
    }
