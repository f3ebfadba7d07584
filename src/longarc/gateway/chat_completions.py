"""OpenAI chat completions, the wire format: a body to a request, and answers to JSON or events.

What the gateway cannot do is refused by name; fields that do not change the answer (user, metadata, ids)
are accepted.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import from_json

from longarc.gateway.answers import Answer
from longarc.gateway.dialect import (
    BOOLEAN,
    MAX_CHOICES,
    MAX_COUNT,
    WHOLE,
    ChatRequest,
    NamedTool,
    Surroundings,
    ToolChoice,
    Wire,
    call_text,
    check_extra,
    checked_stop,
    event,
    refusal,
)
from longarc.gateway.reading import ReadHistory
from longarc.gateway.streaming import Delta, DeltaKind
from longarc.gateway.turn_options import TurnStart
from longarc.gateway.wire import WireError, unsupported
from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.records.sampling import MAX_SEED
from longarc.tokens.arguments import call_from_json, dump_json
from longarc.tokens.tokenizer import Tokenizer


class _TextPart(Wire):
    type: Literal["text"]
    text: str


class _RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


_Content: TypeAlias = str | list[_TextPart]


class _SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: _Content


class _UserMessage(Wire):
    role: Literal["user"]
    content: _Content


class _CallFunction(Wire):
    name: str
    arguments: str = ""


class _Call(Wire):
    id: str
    type: Literal["function"] = "function"
    function: _CallFunction


class _AssistantMessage(Wire):
    role: Literal["assistant"]
    content: str | list[Annotated[_TextPart | _RefusalPart, Field(discriminator="type")]] | None = (
        None
    )
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _ToolMessage(Wire):
    role: Literal["tool"]
    content: _Content
    tool_call_id: str | None = None


_Message = Annotated[
    _SystemMessage | _UserMessage | _AssistantMessage | _ToolMessage, Field(discriminator="role")
]


class _Function(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Wire):
    type: Literal["function"]
    function: _Function


class _ChosenFunction(Wire):
    name: str = Field(min_length=1)


class _ChosenTool(Wire):
    type: Literal["function"]
    function: _ChosenFunction


class _Thinking(Wire):
    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["enabled", "disabled"]
    clear_thinking: Annotated[Literal[False], BOOLEAN] | None = None


class _TemplateOptions(Wire):
    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_thinking: bool | None = None


class _StreamOptions(Wire):
    include_usage: bool | None = None


class _JsonSchema(Wire):
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")


class _TextFormat(Wire):
    type: Literal["text"]


class _JsonFormat(Wire):
    type: Literal["json_object"]


class _SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: _JsonSchema


class ChatCompletionsBody(Wire):
    """The body of a request."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: str
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT), WHOLE] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT), WHOLE] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED), WHOLE] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: (
        Annotated[_TextFormat | _JsonFormat | _SchemaFormat, Field(discriminator="type")] | None
    ) = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    thinking: _Thinking | None = None
    """GLM's own extension of the dialect; reasoning of earlier turns is always kept."""
    chat_template_kwargs: _TemplateOptions | None = None
    """The same, as vLLM and SGLang spell it."""


_WITHOUT_EFFECT: Final = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
)
_ONLY: Final[dict[str, tuple[object, ...]]] = {
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}


class ChatCompletions:
    """The dialect; satisfies ``Dialect``."""

    name = "a chat completion"

    def read(self, body: bytes, around: Surroundings) -> "ChatCompletionsExchange":
        """Understand a request; see ``Dialect.read``."""
        asked, messages = _read(body, around.history)
        check_extra(asked.model_extra, without_effect=_WITHOUT_EFFECT, only=_ONLY)
        includes_usage = asked.stream_options is not None and bool(
            asked.stream_options.include_usage
        )
        if includes_usage and not asked.stream:
            raise unsupported("stream_options", {"include_usage": True}, "send it with stream=true")
        return ChatCompletionsExchange(
            request=_request(asked, messages),
            around=around,
            response_id=around.new_id("chatcmpl-"),
            wants_logprobs=bool(asked.logprobs),
            includes_usage=includes_usage,
        )

    def error(self, error: WireError) -> dict[str, Any]:
        """Return an error's body."""
        return error.body()


@dataclass(slots=True, kw_only=True)
class ChatCompletionsExchange:
    """The codec of one request; satisfies ``Exchange``."""

    request: ChatRequest
    around: Surroundings
    response_id: str
    wants_logprobs: bool
    includes_usage: bool
    _num_calls: Counter[int] = field(default_factory=Counter)
    """Calls told so far, by choice."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response."""
        return {
            "id": self.response_id,
            "object": "chat.completion",
            "created": self.around.created_s,
            "model": self.request.model,
            "choices": [
                {
                    "index": index,
                    "message": _spoken(answer.turn.message),
                    "finish_reason": answer.turn.finish_reason,
                    "logprobs": self._logprobs(answer),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": _usage(answers),
        }

    def opening(self, start: TurnStart) -> bytes:
        """Return a chunk for each choice that says who speaks."""
        spoken = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, spoken) for i in range(self.request.num_choices))

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Return the chunk of a delta."""
        if delta.call is not None:
            number = self._num_calls[choice]
            self._num_calls[choice] += 1
            call = {"index": number} | _wire_call(delta.call)
            return self._chunk(choice, {"tool_calls": [call]})
        field = "content" if delta.kind is DeltaKind.CONTENT else "reasoning_content"
        return self._chunk(choice, {field: delta.text})

    def ping(self) -> bytes:
        """Return a comment, which every client skips."""
        return b": ping\n\n"

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """Return the finish reasons, the log-probabilities, the usage and the end."""
        out = [
            self._chunk(
                index,
                {},
                finish_reason=answer.turn.finish_reason,
                logprobs=self._logprobs(answer),
            )
            for index, answer in enumerate(answers)
        ]
        if self.includes_usage:
            out.append(event(self._head() | {"choices": [], "usage": _usage(answers)}))
        return b"".join([*out, b"data: [DONE]\n\n"])

    def failure(self, error: WireError) -> bytes:
        """Return the error, which the SDKs raise."""
        return event(error.body())

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "chat.completion.chunk",
            "created": self.around.created_s,
            "model": self.request.model,
        }

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        told = {
            "index": choice,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        usage: dict[str, Any] = {"usage": None} if self.includes_usage else {}
        return event(self._head() | {"choices": [told]} | usage)

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        content = token_logprobs(answer, self.around.tokenizer)
        return {"content": content, "refusal": None}


def _read(body: bytes, history: ReadHistory) -> tuple[ChatCompletionsBody, tuple[Message, ...]]:
    """Return a body without the messages that were read before, and all messages.

    Raises:
        WireError: 400, naming the field that is wrong.
    """
    raw = _json_or_none(body)
    sent = raw.get("messages") if isinstance(raw, dict) else None
    try:
        if isinstance(raw, dict) and isinstance(sent, list) and (known := history.known(sent)):
            with contextlib.suppress(ValidationError):
                asked = ChatCompletionsBody.model_validate(raw | {"messages": sent[len(known) :]})
                messages = known + tuple(map(_message, asked.messages))
                history.keep(sent, messages)
                return asked, messages
        # Also where something is wrong: then its place is the one in the whole request.
        asked = ChatCompletionsBody.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error, body, ChatCompletions.name) from None
    messages = tuple(map(_message, asked.messages))
    if isinstance(sent, list):
        history.keep(sent, messages)
    return asked, messages


def _json_or_none(body: bytes) -> object:
    try:
        # The parser that pydantic has, so that a number or a text is the same whoever reads it.
        return from_json(body)
    except ValueError:
        return None


def _request(asked: ChatCompletionsBody, messages: tuple[Message, ...]) -> ChatRequest:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    tools = tuple(_tool(tool.function) for tool in asked.tools or ())
    return ChatRequest(
        model=asked.model,
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(asked.tool_choice),
        one_call=asked.parallel_tool_calls is False,
        max_new_tokens=asked.max_completion_tokens or asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=asked.seed,
        thinking=_thinking(asked),
        stop=checked_stop(stop, "stop"),
        num_choices=asked.n or 1,
        streams=bool(asked.stream),
        json_schema=_json_schema(asked.response_format),
    )


def _thinking(asked: ChatCompletionsBody) -> bool | None:
    if asked.thinking is not None:
        return asked.thinking.type == "enabled"
    if asked.chat_template_kwargs is not None:
        return asked.chat_template_kwargs.enable_thinking
    if asked.reasoning_effort is not None:
        return asked.reasoning_effort != "none"
    return None


def _json_schema(wanted: _TextFormat | _JsonFormat | _SchemaFormat | None) -> str | None:
    if isinstance(wanted, _SchemaFormat):
        return dump_json(wanted.json_schema.schema_)
    return '{"type":"object"}' if isinstance(wanted, _JsonFormat) else None


def _tool_choice(choice: Literal["auto", "none", "required"] | _ChosenTool | None) -> ToolChoice:
    return NamedTool(choice.function.name) if isinstance(choice, _ChosenTool) else choice or "auto"


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    num_prompt = answers[0].turn.num_prompt_tokens
    num_sampled = sum(answer.turn.num_sampled_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def _text(content: "str | list[_TextPart] | list[_TextPart | _RefusalPart] | None") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text if isinstance(part, _TextPart) else part.refusal for part in content)


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


def _spoken(message: Message) -> dict[str, Any]:
    spoken: dict[str, Any] = {
        "role": "assistant",
        "content": message.content or (None if message.tool_calls else ""),
        "refusal": None,
    }
    if message.reasoning is not None:
        spoken["reasoning_content"] = message.reasoning
    if message.tool_calls:
        spoken["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    return spoken


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call_text(call)},
    }


def token_logprobs(answer: Answer, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the log-probability of each sampled token, as both OpenAI dialects spell it."""
    return [
        {
            "token": tokenizer.decode([token_id], keep_special=True),
            "bytes": list(tokenizer.token_bytes(token_id)),
            "logprob": logprob,
            "top_logprobs": [],
        }
        for token_id, logprob in zip(answer.node.sampled_ids, answer.node.logprobs, strict=True)
    ]
