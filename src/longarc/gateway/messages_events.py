"""Anthropic Messages, the wire format of an answer: a message, or the events that build it up.

::

    message_start, ping
      content_block_start -- thinking_delta... signature_delta -- content_block_stop
      content_block_start -- text_delta... -- content_block_stop
      content_block_start -- input_json_delta -- content_block_stop (a call)
    message_delta, message_stop

Thinking blocks carry a signature that clients send back with them. It is a digest of the text, told for
the protocol's sake: what decides whether an answer comes back unchanged is its text.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from longarc.gateway.answers import Answer
from longarc.gateway.dialect import MALFORMED, ChatRequest, Surroundings, event
from longarc.gateway.streaming import Delta, DeltaKind
from longarc.gateway.turn_options import TurnStart
from longarc.gateway.wire import WireError
from longarc.records.message import ToolCall
from longarc.tokens.arguments import dump_json

ID_HERE: Final = "toolu_"
ID_THERE: Final = "call_"
"""How the ids of calls begin in this dialect, and in sessions."""
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


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
        return _event(error_body(error))

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


def error_body(error: WireError) -> dict[str, Any]:
    """Return an error's body."""
    message = error.message
    if error.code == "context_length_exceeded":
        # Claude Code compacts when it reads these words.
        message = f"prompt is too long: {message}"
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


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


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return a call; one that cannot be read gets the name of no tool, so that no client runs it."""
    call_id = ID_HERE + call.id.removeprefix(ID_THERE)
    if call.error is None:
        return {"type": "tool_use", "id": call_id, "name": call.name, "input": call.arguments}
    return {
        "type": "tool_use",
        "id": call_id,
        "name": MALFORMED + call.name,
        "input": {"error": call.error},
    }


def _signature(reasoning: str) -> str:
    digest = hashlib.blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=48).digest()
    return base64.b64encode(digest).decode()


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.turn.num_prompt_tokens,
        "output_tokens": answer.turn.num_sampled_tokens,
    }
