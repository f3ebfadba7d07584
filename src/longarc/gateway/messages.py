"""Anthropic Messages, the wire format: what a request holds. ``messages_events`` writes the answers."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, ValidationError

from longarc.gateway.dialect import (
    MALFORMED,
    MAX_COUNT,
    WHOLE,
    ChatRequest,
    NamedTool,
    Surroundings,
    ToolChoice,
    Wire,
    check_extra,
    checked_stop,
    refusal,
)
from longarc.gateway.messages_events import (
    ID_HERE,
    ID_THERE,
    MessagesExchange,
    error_body,
)
from longarc.gateway.wire import WireError, unsupported
from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import check_depth, dump_json


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
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE] | None = None


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

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE]
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT), WHOLE] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_WITHOUT_EFFECT: Final = frozenset(
    ("metadata", "service_tier", "cache_control", "inference_geo", "anthropic_beta", "betas")
)
_ONLY: Final[dict[str, tuple[object, ...]]] = {"mcp_servers": ([],), "speed": ("standard",)}


class Messages:
    """The dialect; satisfies ``Dialect``."""

    name = "a Messages request"

    def read(self, body: bytes, around: Surroundings) -> MessagesExchange:
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
        return error_body(error)


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
    try:
        check_depth(block.input)
    except ValueError as error:
        return ToolCall(id=call_id, name=block.name, arguments={}, error=f"arguments are {error}")
    return ToolCall(id=call_id, name=block.name, arguments=block.input)


def _session_id_of(call_id: str) -> str:
    if call_id.startswith(ID_HERE):
        return ID_THERE + call_id.removeprefix(ID_HERE)
    return call_id


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
