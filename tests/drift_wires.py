"""A client's spelling of a random conversation, in each dialect.

What the policy said is brought back as the codec told it, the way SDKs do, or spelt anew from what it means, as
programs do that keep histories of their own.
"""

import base64
import json
import random
from collections.abc import Sequence
from typing import Any

from longarc.gateway.chat_completions import ChatCompletions
from longarc.gateway.dialect import MALFORMED, Dialect
from longarc.gateway.messages import Messages
from longarc.gateway.responses import Responses
from longarc.gateway.responses_events import REASONING_PREFIX
from longarc.records.message import Message, Role, ToolCall, ToolSpec


class Wire:
    """Spells requests of one dialect as its clients might."""

    dialect: Dialect

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._heard: list[tuple[Message, Any]] = []
        """Answers of this dialect, and what the client keeps of them."""

    def body(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bytes:
        """Return a request."""
        request = self._request(messages, tools) | {"model": "m"}
        return json.dumps(self._reordered(request), ensure_ascii=self._rng.random() < 0.5).encode()

    def hear(self, message: Message, told: dict[str, Any]) -> None:
        """Keep what a response told of an answer."""
        self._heard.append((message, json.loads(json.dumps(self._kept(told)))))

    def _request(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
        raise NotImplementedError

    def _kept(self, told: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _as_heard(self, message: Message) -> Any:
        """Return what was kept of an answer, or None: of another dialect, edited, or not brought back that way."""
        if message.role is not Role.ASSISTANT or self._rng.random() < 0.4:
            return None
        return next((kept for heard, kept in self._heard if heard is message), None)

    def _parts(self, text: str, kind: str, *, is_marked: bool) -> Any:
        """Return a text alone or as a part, which carries the cache's mark."""
        if not is_marked and self._rng.random() < 0.6:
            return text
        part: dict[str, Any] = {"type": kind, "text": text}
        if is_marked:
            part["cache_control"] = {"type": "ephemeral"}
        return [self._reordered(part)]

    def _arguments(self, call: ToolCall) -> str:
        rng = self._rng
        if call.error is not None:
            return f"malformed call: {call.error}"
        blanks = rng.choice(((",", ":"), (", ", ": "), (" , ", " :\n")))
        return json.dumps(
            self._respelt(call.arguments), ensure_ascii=rng.random() < 0.5, separators=blanks
        )

    def _respelt(self, item: Any) -> Any:
        if isinstance(item, dict):
            return self._reordered({key: self._respelt(inner) for key, inner in item.items()})
        if isinstance(item, list):
            return [self._respelt(inner) for inner in item]
        if isinstance(item, float) and item.is_integer() and self._rng.random() < 0.5:
            return int(item)
        return item

    def _reordered(self, item: dict[str, Any]) -> dict[str, Any]:
        names = list(item)
        self._rng.shuffle(names)
        return {name: item[name] for name in names}


class ChatWire(Wire):
    """Chat completions."""

    dialect = ChatCompletions()

    def _request(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
        marked = self._rng.randrange(len(messages))
        request: dict[str, Any] = {
            "messages": [self._message(m, i == marked) for i, m in enumerate(messages)]
        }
        if tools:
            request["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": t.name,
                        "description": t.description,
                        "parameters": t.parameters,
                    },
                }
                for t in tools
            ]
        return request

    def _kept(self, told: dict[str, Any]) -> Any:
        return told["choices"][0]["message"]

    def _message(self, message: Message, is_marked: bool) -> dict[str, Any]:
        rng = self._rng
        if (heard := self._as_heard(message)) is not None:
            return self._reordered(heard)
        out: dict[str, Any] = {
            "role": message.role.value,
            "content": self._content(message, is_marked),
        }
        if rng.random() < 0.3:
            out |= {"id": f"msg_{rng.random()}", "status": "completed", "annotations": []}
        if message.role is Role.SYSTEM and rng.random() < 0.2:
            out["role"] = "developer"
        if message.reasoning is not None and rng.random() < 0.5:
            out["reasoning_content"] = message.reasoning
        if message.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": self._arguments(call)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            out["tool_call_id"] = message.tool_call_id
        return self._reordered(out)

    def _content(self, message: Message, is_marked: bool) -> Any:
        if not message.content and message.tool_calls and self._rng.random() < 0.5:
            return None
        return self._parts(message.content, "text", is_marked=is_marked)


class ResponsesWire(Wire):
    """Responses; the conversation is sent whole, as clients do that store nothing elsewhere."""

    dialect = Responses()

    def _request(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
        rng = self._rng
        request: dict[str, Any] = {"store": False}
        if messages[0].role is Role.SYSTEM and rng.random() < 0.5:
            request["instructions"] = messages[0].content
            messages = messages[1:]
        marked = rng.randrange(len(messages))
        request["input"] = [
            self._reordered(item)
            for i, message in enumerate(messages)
            for item in self._items(message, is_marked=i == marked)
        ]
        if tools:
            request["tools"] = [
                {
                    "type": "function",
                    "name": t.name,
                    "description": t.description,
                    "parameters": t.parameters,
                    "strict": False,
                }
                for t in tools
            ]
        if rng.random() < 0.5:
            request["include"] = ["reasoning.encrypted_content"]
        return request

    def _kept(self, told: dict[str, Any]) -> Any:
        return told["output"]

    def _items(self, message: Message, *, is_marked: bool) -> list[dict[str, Any]]:
        rng = self._rng
        if (heard := self._as_heard(message)) is not None:
            return list(self._with_sealed_reasoning(heard))
        if message.role is Role.TOOL:
            output = self._parts(message.content, "input_text", is_marked=is_marked)
            return [
                {
                    "type": "function_call_output",
                    "call_id": message.tool_call_id,
                    "output": output,
                }
            ]
        if message.role is Role.ASSISTANT:
            return self._spoken(message)
        item: dict[str, Any] = {
            "role": message.role.value,
            "content": self._parts(message.content, "input_text", is_marked=is_marked),
        }
        if rng.random() < 0.5:
            item["type"] = "message"
        if message.role is Role.SYSTEM and rng.random() < 0.5:
            item["role"] = "developer"
        return [item]

    def _with_sealed_reasoning(self, items: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Keep of reasoning only what is sealed, as clients do that may not read it."""
        if self._rng.random() < 0.5:
            return items
        return [item | {"content": None} if "encrypted_content" in item else item for item in items]

    def _spoken(self, message: Message) -> list[dict[str, Any]]:
        rng = self._rng
        items: list[dict[str, Any]] = []
        if message.content or not message.tool_calls:
            text = self._parts(message.content, "output_text", is_marked=False)
            items.append({"type": "message", "role": "assistant", "content": text})
        items += [
            {
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": self._arguments(call),
            }
            for call in message.tool_calls
        ]
        if message.reasoning is not None and rng.random() < 0.5:
            sealed = REASONING_PREFIX + base64.b64encode(message.reasoning.encode()).decode()
            thought = [{"type": "reasoning_text", "text": message.reasoning}]
            items.insert(
                0,
                {"type": "reasoning", "summary": []}
                | rng.choice(({"content": thought}, {"encrypted_content": sealed})),
            )
        for item in items:
            if rng.random() < 0.3:
                item |= {"id": f"item_{rng.random()}", "status": "completed"}
        return items


class MessagesWire(Wire):
    """Messages."""

    dialect = Messages()

    def _request(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
        rng = self._rng
        request: dict[str, Any] = {"max_tokens": 4000}
        if messages[0].role is Role.SYSTEM and rng.random() < 0.7:
            request["system"] = self._parts(
                messages[0].content, "text", is_marked=rng.random() < 0.5
            )
            messages = messages[1:]
        marked = rng.randrange(len(messages))
        out: list[dict[str, Any]] = []
        joins = False
        for index, message in enumerate(messages):
            told = self._message(message, is_marked=index == marked)
            if joins and told["role"] == "user":
                # Results and what the user says behind them are one message, or several.
                out[-1]["content"] = self._blocks(out[-1]["content"]) + self._blocks(
                    told["content"]
                )
            else:
                out.append(told)
            joins = message.role is Role.TOOL and rng.random() < 0.7
        request["messages"] = [self._reordered(message) for message in out]
        if tools:
            request["tools"] = [
                {"name": t.name, "description": t.description, "input_schema": t.parameters}
                for t in tools
            ]
        return request

    def _kept(self, told: dict[str, Any]) -> Any:
        return {"role": "assistant", "content": told["content"]}

    def _blocks(self, content: Any) -> list[Any]:
        return content if isinstance(content, list) else [{"type": "text", "text": content}]

    def _message(self, message: Message, *, is_marked: bool) -> dict[str, Any]:
        if (heard := self._as_heard(message)) is not None:
            return dict(heard)
        if message.role is Role.TOOL:
            block: dict[str, Any] = {
                "type": "tool_result",
                "tool_use_id": self._wire_id(message.tool_call_id or ""),
                "content": self._parts(message.content, "text", is_marked=is_marked),
            }
            if self._rng.random() < 0.3:
                block["is_error"] = self._rng.random() < 0.5
            return {"role": "user", "content": [self._reordered(block)]}
        if message.role is Role.ASSISTANT:
            return {"role": "assistant", "content": self._spoken(message)}
        content = self._parts(message.content, "text", is_marked=is_marked)
        return {"role": message.role.value, "content": content}

    def _spoken(self, message: Message) -> Any:
        rng = self._rng
        if not message.tool_calls and rng.random() < 0.3:
            return message.content
        blocks: list[dict[str, Any]] = []
        if message.reasoning is not None and rng.random() < 0.5:
            blocks.append(
                {"type": "thinking", "thinking": message.reasoning, "signature": "c2lnbmVk"}
            )
        if message.content or rng.random() < 0.2:
            blocks.append({"type": "text", "text": message.content})
        blocks += [
            {
                "type": "tool_use",
                "id": self._wire_id(call.id),
                "name": call.name if call.error is None else MALFORMED + call.name,
                "input": self._respelt(call.arguments)
                if call.error is None
                else {"error": call.error},
            }
            for call in message.tool_calls
        ]
        return [self._reordered(block) for block in blocks]

    def _wire_id(self, call_id: str) -> str:
        return "toolu_" + call_id.removeprefix("call_")


WIRES = (ChatWire, ResponsesWire, MessagesWire)
