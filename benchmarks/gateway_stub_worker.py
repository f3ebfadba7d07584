"""An engine that has sampled already: every request gets the same ids at once. Run by gateway.py in a process of its own.

It speaks LongArc's engine protocol and, for the peers, chat completions as vLLM answers them when it is asked for
token ids and log-probabilities. It is written for speed, because it shares a core with the load generator.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import httptools
import uvloop

_INTERVAL = re.compile(rb'"stream_interval_tokens":(\d+)')


class Answers:
    """All that can be said, made beforehand."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._ids, self._text = job["ids"], job["text"]
        self._logprobs = [-0.25 - i / 1024 for i in range(len(self._ids))]
        self._lines: dict[int, bytes] = {}
        self.health = _whole(_HEALTH)
        self.describe = _whole(
            {
                "model": {},
                "attention": "dense",
                "max_context_tokens": job["max_context_tokens"],
                "num_ranks": 1,
                "weight_quantisation": "none",
            }
        )
        self.models = _whole({"object": "list", "data": [{"id": "stub", "object": "model"}]})
        self._chat = self._chat_reply()
        self._prompt_ids = b",".join(b"%d" % (i % 32768) for i in range(100, 6600))

    def lines(self, body: bytes) -> bytes:
        """Return the pieces of a completion, as many tokens each as the request wants."""
        found = _INTERVAL.search(body)
        interval = int(found[1]) if found else 0
        known = self._lines.get(interval)
        if known is None:
            known = self._lines[interval] = self._framed(interval or len(self._ids))
        return known

    def chat(self, body: bytes) -> bytes:
        """Return a chat completion; with ids, and the prompt's, where they are asked for."""
        before, after = self._chat
        ids = self._prompt_ids if b'"return_token_ids"' in body else b""
        content = before + ids + after
        return _head(len(content), b"application/json") + content

    def _framed(self, interval: int) -> bytes:
        chunks = []
        for start in range(0, len(self._ids), interval):
            end = min(start + interval, len(self._ids))
            piece = {
                "token_ids": self._ids[start:end],
                "logprobs": self._logprobs[start:end],
                "policy_version": 3,
                "finish_reason": "stop" if end == len(self._ids) else None,
            }
            line = json.dumps(piece).encode() + b"\n"
            chunks.append(b"%x\r\n%s\r\n" % (len(line), line))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + b"".join(chunks) + b"0\r\n\r\n"

    def _chat_reply(self) -> tuple[bytes, bytes]:
        content = [
            {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []}
            for i, p in zip(self._ids, self._logprobs, strict=True)
        ]
        reply = {
            "id": "chatcmpl-stub",
            "object": "chat.completion",
            "created": 1,
            "model": "stub",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": self._text},
                    "logprobs": {"content": content},
                    "finish_reason": "stop",
                    "token_ids": self._ids,
                }
            ],
            "usage": {"prompt_tokens": 6500, "completion_tokens": 64, "total_tokens": 6564},
            "prompt_token_ids": "@",
        }
        before, _, after = json.dumps(reply).encode().partition(b'"@"')
        return before + b"[", b"]" + after


class Connection(asyncio.Protocol):
    """One connection, requests one after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._body.clear()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._url == b"/v1/stream":
            # What the sampling asks for stands behind the ids.
            self._transport.write(self._answers.lines(b"".join(self._body)[-600:]))
        elif self._url.endswith(b"/chat/completions"):
            self._transport.write(self._answers.chat(b"".join(self._body)))
        elif self._url == b"/v1/engine":
            self._transport.write(self._answers.describe)
        elif self._url.startswith(b"/v1/models"):
            self._transport.write(self._answers.models)
        else:
            self._transport.write(self._answers.health)


_HEALTH = {
    "is_ready": True,
    "policy_version": 3,
    "num_running": 0,
    "num_waiting": 0,
    "num_sampled_tokens": 0,
    "num_prompt_tokens": 0,
    "num_cached_tokens": 0,
}


def _head(length: int, kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, length)


def _whole(body: object) -> bytes:
    content = json.dumps(body).encode()
    return _head(len(content), b"application/json") + content


async def main(job: dict[str, Any]) -> None:
    """Answer until killed."""
    answers = Answers(job)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", job["port"])
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(json.loads(Path(sys.argv[1]).read_text())))
