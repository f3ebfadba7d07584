"""OpenAI chat completions, the wire format: JSON to messages, and a turn back to JSON.

A codec without state. What the gateway cannot do (streaming, several choices, forced tools, stop
strings) is refused by name; fields that do not change the answer (user, metadata, ids) are accepted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longarc.gateway.session import Answer
from longarc.gateway.wire import MAX_SHOWN_CHARS, WireError, unsupported
from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.records.sampling import MAX_SEED
from longarc.tokens.arguments import call_from_json
from longarc.tokens.tokenizer import Tokenizer


class _Wire(BaseModel):
    # Clients send history back with fields of their own (ids, annotations, refusal): not our business.
    model_config = ConfigDict(frozen=True, extra="ignore")


class _TextPart(_Wire):
    type: Literal["text"]
    text: str


_Content: TypeAlias = str | list[_TextPart]


class _SystemMessage(_Wire):
    role: Literal["system", "developer"]
    content: _Content


class _UserMessage(_Wire):
    role: Literal["user"]
    content: _Content


class _CallFunction(_Wire):
    name: str
    arguments: str = ""


class _Call(_Wire):
    id: str
    type: Literal["function"] = "function"
    function: _CallFunction


class _AssistantMessage(_Wire):
    role: Literal["assistant"]
    content: _Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _ToolMessage(_Wire):
    role: Literal["tool"]
    content: _Content
    tool_call_id: str | None = None


_Message = Annotated[
    _SystemMessage | _UserMessage | _AssistantMessage | _ToolMessage, Field(discriminator="role")
]


class _Function(_Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Wire):
    type: Literal["function"]
    function: _Function


class _Thinking(_Wire):
    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["enabled", "disabled"]
    clear_thinking: Literal[False] | None = None


class _Request(_Wire):
    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    logprobs: bool | None = None
    thinking: _Thinking | None = None
    """GLM's own extension of the dialect; reasoning of earlier turns is always kept."""


_WITHOUT_EFFECT: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
_ONLY: Final[dict[str, tuple[object, ...]]] = {
    "stream": (False,),
    "n": (1,),
    "top_logprobs": (0,),
    "stop": ([],),
    "parallel_tool_calls": (True,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
"""Options of the dialect that are accepted at the value that asks for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat-completions request, understood."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    tool_choice: Literal["auto", "none"]
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    thinking: bool | None
    wants_logprobs: bool


def read_request(body: bytes) -> ChatRequest:
    """Read a request body.

    Raises:
        WireError: 400, naming the field that is wrong or not supported.
    """
    try:
        request = _Request.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY:
            raise unsupported(name, value, "leave it out")
        if value not in _ONLY[name]:
            allowed = " or ".join(repr(option) for option in _ONLY[name])
            raise unsupported(name, value, f"leave it out or send {allowed}")
    if request.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", request.tool_choice, "send 'auto' or 'none'")
    return ChatRequest(
        model=request.model,
        messages=tuple(_message(message) for message in request.messages),
        tools=tuple(_tool(tool.function) for tool in request.tools or ()),
        tool_choice="none" if request.tool_choice == "none" else "auto",
        max_new_tokens=request.max_completion_tokens or request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        thinking=None if request.thinking is None else request.thinking.type == "enabled",
        wants_logprobs=bool(request.logprobs),
    )


def write_response(
    answer: Answer, request: ChatRequest, tokenizer: Tokenizer, *, response_id: str, created_s: int
) -> dict[str, Any]:
    """Return the body of a response."""
    turn = answer.turn
    message = turn.message
    spoken: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.tool_calls else ""),
        "refusal": None,
    }
    if message.reasoning is not None:
        spoken["reasoning_content"] = message.reasoning
    if message.tool_calls:
        spoken["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created_s,
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": spoken,
                "finish_reason": turn.finish_reason,
                "logprobs": _logprobs(answer, tokenizer) if request.wants_logprobs else None,
            }
        ],
        "usage": {
            "prompt_tokens": turn.num_prompt_tokens,
            "completion_tokens": turn.num_sampled_tokens,
            "total_tokens": turn.num_prompt_tokens + turn.num_sampled_tokens,
        },
    }


def _refusal(error: ValidationError) -> WireError:
    first = error.errors(include_url=False)[0]
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part in _Request.model_fields or part in _FIELD_NAMES:
            # The rest are names of union members, which mean nothing to a client.
            param += f".{part}" if param else part
    what = f"{param}: {first['msg']}" if param else first["msg"]
    if param and isinstance(first["input"], int | float | str):
        what += f", got {str(first['input'])[:MAX_SHOWN_CHARS]!r}"
    return WireError(400, f"the request is not a chat completion: {what}", param=param or None)


_FIELD_NAMES: Final = frozenset(
    name
    for model in (
        _TextPart,
        _AssistantMessage,
        _ToolMessage,
        _Call,
        _CallFunction,
        _Tool,
        _Function,
        _Thinking,
    )
    for name in model.model_fields
)


def _text(content: _Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _message(
    message: _SystemMessage | _UserMessage | _AssistantMessage | _ToolMessage,
) -> Message:
    text = _text(message.content)
    if isinstance(message, _AssistantMessage):
        calls = tuple(
            call_from_json(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        )
        return Message(
            role=Role.ASSISTANT,
            content=text,
            reasoning=message.reasoning_content,
            tool_calls=calls,
        )
    if isinstance(message, _ToolMessage):
        return Message(role=Role.TOOL, content=text, tool_call_id=message.tool_call_id)
    role = Role.USER if isinstance(message, _UserMessage) else Role.SYSTEM
    return Message(role=role, content=text)


def _tool(function: _Function) -> ToolSpec:
    parameters: dict[str, Json] = function.parameters or {"type": "object", "properties": {}}
    return ToolSpec(
        name=function.name, description=function.description or "", parameters=parameters
    )


def _wire_call(call: ToolCall) -> dict[str, Any]:
    # A malformed call must not look runnable: its arguments are no JSON, so the client reports it by id.
    arguments = f"malformed call: {call.error}" if call.error else _dump(call.arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _dump(arguments: Json) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _logprobs(answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    ids: Sequence[int] = answer.node.sampled_ids
    for token_id, logprob in zip(ids, answer.node.logprobs, strict=True):
        content.append(
            {
                "token": tokenizer.decode([token_id], keep_special=True),
                "bytes": list(tokenizer.token_bytes(token_id)),
                "logprob": logprob,
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}
