"""OpenAI Responses, the wire format: what a request holds. ``responses_events`` writes the answers.

The items of one answer (reasoning, text, calls) are one message of the conversation. Tools inside a
namespace are told to the model as ``namespace__name`` and called back with both names; free-form (custom)
tools take one text; tools that OpenAI's own servers would run are left out of the prompt.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError

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
    refusal,
)
from longarc.gateway.responses_events import (
    REASONING_PREFIX,
    CalledTool,
    ResponsesExchange,
    Told,
)
from longarc.gateway.wire import WireError, unsupported
from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.tokens.arguments import call_from_json, dump_json


class _Text(Wire):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class _Refusal(Wire):
    type: Literal["refusal"]
    refusal: str


class _MessageItem(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[_Text | _Refusal, Field(discriminator="type")]]


class _FunctionCall(Wire):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None


class _CallOutput(Wire):
    call_id: str
    output: str | list[_Text]


class _CustomCall(Wire):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class _Reasoning(Wire):
    content: list[_Text] | None = None
    encrypted_content: str | None = None


def _kind(item: object) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


_Item: TypeAlias = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_CallOutput, Tag("function_call_output")]
    | Annotated[_CustomCall, Tag("custom_tool_call")]
    | Annotated[_CallOutput, Tag("custom_tool_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class _Tool(Wire):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    format: dict[str, Any] | None = None


class _ChosenTool(Wire):
    type: Literal["function", "custom"]
    name: str = Field(min_length=1)


class _ReasoningOptions(Wire):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class _TextFormat(Wire):
    type: Literal["text", "json_object"]


class _SchemaFormat(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")


class _TextOptions(Wire):
    format: Annotated[_TextFormat | _SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesBody(Wire):
    """The body of a request."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    reasoning: _ReasoningOptions | None = None
    text: _TextOptions | None = None
    metadata: dict[str, Any] | None = None


_WITHOUT_EFFECT: Final = frozenset(
    (
        "client_metadata",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    )
)
_ONLY: Final[dict[str, tuple[object, ...]]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
}
_INCLUDABLE: Final = frozenset(("reasoning.encrypted_content", "message.output_text.logprobs"))
_LEFT_OUT: Final = ("web_search", "image_generation", "tool_search", "local_shell")


class Responses:
    """The dialect; satisfies ``Dialect``."""

    name = "a Responses request"

    def read(self, body: bytes, around: Surroundings) -> ResponsesExchange:
        """Understand a request; see ``Dialect.read``."""
        try:
            asked = ResponsesBody.model_validate_json(body)
        except ValidationError as error:
            raise refusal(error, body, self.name) from None
        check_extra(asked.model_extra, without_effect=_WITHOUT_EFFECT, only=_ONLY)
        include = asked.include or []
        for name in include:
            if name not in _INCLUDABLE:
                raise unsupported("include", name, f"send some of {sorted(_INCLUDABLE)}")
        tools, called = _tools(asked.tools or ())
        stores = asked.store is not False
        return ResponsesExchange(
            request=ChatRequest(
                model=asked.model,
                messages=tuple(_conversation(asked)),
                tools=tools,
                tool_choice=_tool_choice(asked.tool_choice),
                one_call=asked.parallel_tool_calls is False,
                max_new_tokens=asked.max_output_tokens,
                temperature=asked.temperature,
                top_p=asked.top_p,
                thinking=_thinking(asked.reasoning),
                streams=bool(asked.stream),
                json_schema=_json_schema(asked.text),
                num_instructions=int(bool(asked.instructions)),
                previous_id=asked.previous_response_id,
                stores=stores,
            ),
            around=around,
            response_id=around.new_id("resp_"),
            told=Told(
                called=called,
                encrypts="reasoning.encrypted_content" in include or not stores,
                wants_logprobs="message.output_text.logprobs" in include,
                echo=_echo(asked),
            ),
        )

    def error(self, error: WireError) -> dict[str, Any]:
        """Return an error's body."""
        return error.body()


def _echo(asked: ResponsesBody) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    told = asked.model_dump(
        mode="json",
        by_alias=True,
        include={
            "instructions",
            "max_output_tokens",
            "parallel_tool_calls",
            "previous_response_id",
            "temperature",
            "tool_choice",
            "top_p",
            "metadata",
        },
    )
    effort = None if asked.reasoning is None else asked.reasoning.effort
    wanted = None if asked.text is None else asked.text.format
    return told | {
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "tool_choice": told["tool_choice"] or "auto",
        "metadata": asked.metadata or {},
        "tools": [],
        "truncation": "disabled",
        "store": asked.store is not False,
        "reasoning": {"effort": effort, "summary": None},
        "text": {
            "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)
        },
    }


def _conversation(asked: ResponsesBody) -> list[Message]:
    messages: list[Message] = []
    if asked.instructions:
        messages.append(Message(role=Role.SYSTEM, content=asked.instructions))
    if isinstance(asked.input, str):
        messages.append(Message(role=Role.USER, content=asked.input))
        return messages
    if not asked.input:
        raise WireError(400, "input: it holds no item; send at least one", param="input")
    spoken: list[Message] = []
    for item in asked.input:
        message = _message(item)
        if message.role is Role.ASSISTANT:
            spoken.append(message)
            continue
        messages += _joined(spoken)
        spoken.clear()
        messages.append(message)
    return messages + _joined(spoken)


def _joined(spoken: Sequence[Message]) -> list[Message]:
    """Join the items of one answer."""
    if not spoken:
        return []
    message = Message(
        role=Role.ASSISTANT,
        content="".join(item.content for item in spoken),
        reasoning="".join(item.reasoning or "" for item in spoken) or None,
        tool_calls=tuple(call for item in spoken for call in item.tool_calls),
    )
    return [message]


def _message(
    item: "_MessageItem | _FunctionCall | _CallOutput | _CustomCall | _Reasoning",
) -> Message:
    if isinstance(item, _MessageItem):
        role = Role.SYSTEM if item.role == "developer" else Role(item.role)
        return Message(role=role, content=_text(item.content))
    if isinstance(item, _CallOutput):
        return Message(role=Role.TOOL, content=_text(item.output), tool_call_id=item.call_id)
    if isinstance(item, _Reasoning):
        return Message(role=Role.ASSISTANT, content="", reasoning=_thought(item))
    return Message(role=Role.ASSISTANT, content="", tool_calls=(_call(item),))


def _text(content: "str | Sequence[_Text | _Refusal]") -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, _Text) else part.refusal for part in content)


def _thought(item: _Reasoning) -> str | None:
    """Return the reasoning that an item brings back; somebody else's encrypted one tells nothing."""
    if item.content:
        return _text(item.content)
    sealed = item.encrypted_content or ""
    if not sealed.startswith(REASONING_PREFIX):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(REASONING_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _call(item: _FunctionCall | _CustomCall) -> ToolCall:
    name = f"{item.namespace}__{item.name}" if item.namespace else item.name
    if isinstance(item, _FunctionCall):
        return call_from_json(item.call_id, name, item.arguments)
    if name.startswith(MALFORMED):
        return ToolCall(
            id=item.call_id, name=name.removeprefix(MALFORMED), arguments={}, error=item.input
        )
    return ToolCall(id=item.call_id, name=name, arguments={"input": item.input})


def _tools(tools: Sequence[_Tool]) -> tuple[tuple[ToolSpec, ...], dict[str, CalledTool]]:
    """Return the tools that the model is told of, and what each is called back as."""
    specs: list[ToolSpec] = []
    called: dict[str, CalledTool] = {}

    def add(tool: _Tool, place: str, namespace: str | None) -> None:
        if not tool.name:
            raise WireError(400, f"{place}.name: a {tool.type} tool needs one", param=place)
        name = f"{namespace}__{tool.name}" if namespace else tool.name
        is_custom = tool.type == "custom"
        called[name] = CalledTool(name=tool.name, namespace=namespace, is_custom=is_custom)
        parameters: dict[str, Json] = (
            _custom_parameters(tool)
            if is_custom
            else tool.parameters or {"type": "object", "properties": {}}
        )
        specs.append(ToolSpec(name=name, description=tool.description or "", parameters=parameters))

    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.type in ("function", "custom"):
            add(tool, place, None)
        elif tool.type == "namespace":
            for number, raw in enumerate(tool.tools or ()):
                inner = _inner(raw, f"{place}.tools[{number}]")
                if inner.type in ("function", "custom"):
                    add(inner, f"{place}.tools[{number}]", tool.name)
        elif not tool.type.startswith(_LEFT_OUT):
            raise unsupported(
                f"{place}.type",
                tool.type,
                "send tools that your own program runs: function, custom or namespace",
            )
    return tuple(specs), called


def _inner(raw: dict[str, Any], place: str) -> _Tool:
    try:
        return _Tool.model_validate(raw)
    except ValidationError as error:
        told = error.errors(include_url=False)[0]["msg"]
        raise WireError(400, f"{place} is not a tool: {told}", param=place) from None


def _custom_parameters(tool: _Tool) -> dict[str, Json]:
    """Return the parameters of a tool that takes a text, with the grammar of the text where there is one."""
    described: dict[str, Json] = {"type": "string"}
    definition = (tool.format or {}).get("definition")
    if isinstance(definition, str):
        described["description"] = f"Follows this grammar:\n{definition}"
    return {"type": "object", "properties": {"input": described}, "required": ["input"]}


def _tool_choice(
    choice: "Literal['auto', 'none', 'required'] | _ChosenTool | None",
) -> ToolChoice:
    return NamedTool(choice.name) if isinstance(choice, _ChosenTool) else choice or "auto"


def _thinking(options: _ReasoningOptions | None) -> bool | None:
    return None if options is None or options.effort is None else options.effort != "none"


def _json_schema(options: _TextOptions | None) -> str | None:
    wanted = None if options is None else options.format
    if isinstance(wanted, _SchemaFormat):
        return dump_json(wanted.schema_)
    return '{"type":"object"}' if wanted is not None and wanted.type == "json_object" else None
