"""OpenAI Responses, the wire format of an answer: a response object, or the events that build it up.

::

    created, in_progress
      output_item.added (reasoning) -- reasoning_text.delta... done -- output_item.done
      output_item.added (message) -- content_part.added -- output_text.delta... done -- content_part.done -- item.done
      output_item.added (call) -- function_call_arguments.delta, done -- output_item.done
    completed | incomplete | failed
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from longarc.gateway.answers import Answer
from longarc.gateway.chat_completions import token_logprobs
from longarc.gateway.dialect import (
    MALFORMED,
    ChatRequest,
    Surroundings,
    call_text,
    event,
)
from longarc.gateway.streaming import Delta, DeltaKind
from longarc.gateway.turn_options import TurnStart
from longarc.gateway.wire import WireError
from longarc.records.message import ToolCall

REASONING_PREFIX: Final = "longarc."
"""Begins encrypted reasoning that this gateway made: the text itself, in base64, so that a client that keeps
nothing else brings it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """What a tool that the model names is called back as."""

    name: str
    namespace: str | None
    is_custom: bool
    """Whether it takes a text in place of JSON arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What of a request decides how its answer is written."""

    called: Mapping[str, CalledTool]
    """By the name that the model knows."""
    encrypts: bool
    """Whether reasoning is also given in the sealed form that clients bring back."""
    wants_logprobs: bool
    echo: Mapping[str, Any]
    """Fields that a response repeats."""


@dataclass(slots=True, kw_only=True)
class ResponsesExchange:
    """The codec of one request; satisfies ``Exchange``."""

    request: ChatRequest
    around: Surroundings
    response_id: str
    told: Told
    _number: int = 0
    """Of the next event."""
    _items: list[dict[str, Any]] = field(default_factory=list)
    """Items that are complete."""
    _open: DeltaKind | None = None
    _open_id: str = ""
    _text: list[str] = field(default_factory=list)
    """Of the item that is being told."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response."""
        (answer,) = answers
        message = answer.turn.message
        items: list[dict[str, Any]] = []
        if message.reasoning:
            items.append(self._reasoning_item(self.around.new_id("rs_"), message.reasoning))
        if message.content or not (items or message.tool_calls):
            # Also where nothing was said: what is not told, the client cannot bring back.
            items.append(self._message_item(self.around.new_id("msg_"), message.content, answer))
        items += [self._call_item(self.around.new_id("fc_"), call) for call in message.tool_calls]
        return self._ended(items, answer)

    def opening(self, start: TurnStart) -> bytes:
        """Return the events that begin a response."""
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self.ping()

    def delta(self, choice: int, delta: Delta) -> bytes:
        """Return the events of a delta, those that begin and end items included."""
        if delta.call is not None:
            return self._close() + self._call(delta.call)
        out = b""
        if self._open is not delta.kind:
            out = self._close() + self._begin(delta.kind)
        self._text.append(delta.text)
        if delta.kind is DeltaKind.REASONING:
            return out + self._part_event("response.reasoning_text.delta", delta=delta.text)
        return out + self._part_event("response.output_text.delta", delta=delta.text, logprobs=[])

    def ping(self) -> bytes:
        """Return an event that says nothing new; comments do not count as life for some clients."""
        return self._event("response.in_progress", response=self._response("in_progress", []))

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """Return the end of the last item and the whole response."""
        (answer,) = answers
        if self._open is None and not self._items:
            out = self._begin(DeltaKind.CONTENT) + self._close(answer)
        else:
            out = self._close(answer)
        response = self._ended(self._items, answer)
        return out + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: WireError) -> bytes:
        """Return the event of a response that failed."""
        told = {"code": error.code or "server_error", "message": error.message}
        failed = self._response("failed", self._items) | {"error": told}
        return self._event("response.failed", response=failed)

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.around.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.request.model,
            "output": items,
            "usage": None,
            **self.told.echo,
        }

    def _ended(self, items: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        turn = answer.turn
        is_cut = turn.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed", items)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": turn.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.num_sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.num_prompt_tokens + turn.num_sampled_tokens,
        }
        return response

    def _begin(self, kind: DeltaKind) -> bytes:
        """Begin an item of text or reasoning."""
        self._open = kind
        is_reasoning = kind is DeltaKind.REASONING
        self._open_id = self.around.new_id("rs_" if is_reasoning else "msg_")
        item: dict[str, Any] = {"id": self._open_id, "status": "in_progress"}
        if is_reasoning:
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        return self._item_event("response.output_item.added", item) + self._part_event(
            "response.content_part.added", part=_part(kind, "")
        )

    def _close(self, answer: Answer | None = None) -> bytes:
        """End the item that is open."""
        if self._open is None:
            return b""
        kind, text = self._open, "".join(self._text)
        self._open = None
        self._text.clear()
        if kind is DeltaKind.REASONING:
            item = self._reasoning_item(self._open_id, text)
            done = self._part_event("response.reasoning_text.done", text=text)
        else:
            item = self._message_item(self._open_id, text, answer)
            done = self._part_event("response.output_text.done", text=text, logprobs=[])
        done += self._part_event("response.content_part.done", part=item["content"][0])
        return done + self._end(item)

    def _call(self, call: ToolCall) -> bytes:
        """Tell a whole call."""
        item = self._call_item(self.around.new_id("fc_"), call)
        field_name = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if field_name == "input" else "function_call_arguments"
        place = {"item_id": item["id"], "output_index": len(self._items)}
        text = item[field_name]
        begun = item | {field_name: "", "status": "in_progress"}
        done = {field_name: text} | ({"name": item["name"]} if field_name == "arguments" else {})
        return (
            self._item_event("response.output_item.added", begun)
            + self._event(f"response.{kind}.delta", delta=text, **place)
            + self._event(f"response.{kind}.done", **done, **place)
            + self._end(item)
        )

    def _end(self, item: dict[str, Any]) -> bytes:
        out = self._item_event("response.output_item.done", item)
        self._items.append(item)
        return out

    def _item_event(self, name: str, item: dict[str, Any]) -> bytes:
        return self._event(name, output_index=len(self._items), item=item)

    def _part_event(self, name: str, /, **data: Any) -> bytes:
        return self._event(
            name, item_id=self._open_id, output_index=len(self._items), content_index=0, **data
        )

    def _event(self, name: str, /, **data: Any) -> bytes:
        number = self._number
        self._number += 1
        return event({"type": name, "sequence_number": number} | data, name=name)

    def _reasoning_item(self, item_id: str, text: str) -> dict[str, Any]:
        item: dict[str, Any] = {
            "id": item_id,
            "type": "reasoning",
            "summary": [],
            "content": [_part(DeltaKind.REASONING, text)],
            "status": "completed",
        }
        if self.told.encrypts:
            sealed = base64.b64encode(text.encode("utf-8", "replace")).decode()
            item["encrypted_content"] = REASONING_PREFIX + sealed
        return item

    def _message_item(self, item_id: str, text: str, answer: Answer | None) -> dict[str, Any]:
        part = _part(DeltaKind.CONTENT, text)
        if self.told.wants_logprobs and answer is not None:
            part["logprobs"] = token_logprobs(answer, self.around.tokenizer)
        return {
            "id": item_id,
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def _call_item(self, item_id: str, call: ToolCall) -> dict[str, Any]:
        """Return a call; one that cannot be read has no JSON or no tool's name, so that no client runs it."""
        known = self.told.called.get(call.name)
        item: dict[str, Any] = {
            "id": item_id,
            "call_id": call.id,
            "name": call.name if known is None else known.name,
            "status": "completed",
        }
        if known is not None and known.namespace is not None:
            item["namespace"] = known.namespace
        if known is None or not known.is_custom:
            return item | {"type": "function_call", "arguments": call_text(call)}
        text = call.arguments.get("input")
        if call.error is not None or not isinstance(text, str):
            item["name"] = MALFORMED + known.name
            text = call.error or "the call has no text 'input'"
        return item | {"type": "custom_tool_call", "input": text}


def _part(kind: DeltaKind, text: str) -> dict[str, Any]:
    if kind is DeltaKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
