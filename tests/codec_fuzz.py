"""Fuzzes the HTTP door: bodies near what clients send, and bodies from anywhere.

``make fuzz-gateway`` runs a hundred thousand cases; ``test_codec_fuzz`` for a moment. Every
answer has to be 200 or an error of its dialect's own form with a status that the OpenAPI description names,
never a 500; a stream has to end as its dialect ends streams.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import repeat

import httpx

from fakes import FakeEngine
from gateway_cases import DONE, LOOK, SAMPLING, Door
from longarc.gateway.http import HttpSettings

STRANGE = (
    None, True, False, 0, -1, 1, 2**63, 1e400, -0.0, 0.5, "", "x", " ", "\x00", "é🦊", "auto", "none", "required",
    "user", "assistant", "tool", "system", "text", "function", "json_schema", "\ud800", [], {}, [None], [[]], {"": {}},
    {"type": "text"}, {"type": "text", "text": "t"}, "x" * 300,
)  # fmt: skip
_CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
}
_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
BODIES = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "out"},
        ],
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": _PARAMETERS}}],
        "tool_choice": "auto",
        "max_tokens": 40,
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 3,
        "n": 1,
        "stop": ["zz"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "response_format": {"type": "text"},
        "thinking": {"type": "enabled"},
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "out"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "p"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "out"},
        ],
        "tools": [
            {"type": "function", "name": "bash", "parameters": _PARAMETERS},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "function", "name": "bash"},
        "max_output_tokens": 40,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 40,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "o"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "tools": [{"name": "bash", "input_schema": _PARAMETERS}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["zz"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "low"},
        "stream": True,
    },
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = {
    key: BODIES["/v1/messages"][key] for key in ("model", "messages", "system", "tools")
}
STATUSES = {200, 400, 401, 403, 404, 408, 413, 429, 503}


def mutated(value: object, random_: random.Random, strength: float) -> object:
    """A value of which some parts are others."""
    if random_.random() < strength:
        return random_.choice(STRANGE)
    if isinstance(value, dict):
        out = {
            random_.choice(("type", "extra", "role", key)) if random_.random() < strength / 2 else key:
            mutated(item, random_, strength)
            for key, item in value.items()
            if random_.random() > strength
        }  # fmt: skip
        if random_.random() < strength:
            out[random_.choice(("user", "metadata", "unknown", "n", "top_logprobs"))] = (
                random_.choice(STRANGE)
            )
        return out
    if isinstance(value, list):
        kept = [mutated(item, random_, strength) for item in value if random_.random() > strength]
        random_.shuffle(kept) if random_.random() < strength else None
        return kept * random_.choice((1, 1, 1, 2))
    return value


def case(random_: random.Random) -> tuple[str, bytes]:
    """A path and a body."""
    path = random_.choice(list(BODIES))
    value = mutated(BODIES[path], random_, random_.choice((0.0, 0.01, 0.03, 0.1, 0.3)))
    if isinstance(value, dict) and random_.random() < 0.5:
        value.pop("stream", None)
        value.pop("stream_options", None)
    body = json.dumps(value, ensure_ascii=random_.random() < 0.8).encode("utf-8", "surrogatepass")
    if random_.random() < 0.1:
        position = random_.randrange(len(body) + 1)
        cut = bytes(random_.randrange(256) for _ in range(random_.randrange(4)))
        body = body[:position] + cut + body[position + random_.randrange(3) :]
    if random_.random() < 0.03:
        body = body[: random_.randrange(len(body) + 1)]
    return path, body


def check(path: str, answer: httpx.Response) -> None:
    """Raise where an answer is not what its dialect promises."""
    assert answer.status_code in STATUSES, answer.text
    is_anthropic = path.startswith("/v1/messages")
    if answer.status_code != 200:
        error = answer.json()
        assert error["error"]["message"]
        assert error["error"]["type"]
        assert ("type" in error) is is_anthropic
        return
    if not answer.headers["content-type"].startswith("text/event-stream"):
        assert isinstance(answer.json(), dict)
        return
    blocks = answer.text.rstrip("\n").split("\n\n")
    events = [block.rpartition("data: ")[2] for block in blocks if "data: " in block]
    parsed = [json.loads(e) for e in events if e != "[DONE]"]
    last = parsed[-1]
    if "error" in last or last.get("type") in ("error", "response.failed"):
        raise AssertionError(f"a stream failed: {last}")
    ends = {
        "/v1/messages": ("message_stop",),
        "/v1/responses": ("response.completed", "response.incomplete"),
    }
    assert (events[-1] == "[DONE]") if path not in ends else (last["type"] in ends[path])


async def fuzz(
    num_cases: int, seed: int, tell: Callable[[str], object] = lambda _: None
) -> Counter[str]:
    """Send cases one after the other; returns how often each route answered with each status."""
    counts: Counter[str] = Counter()
    script: Iterator[list[int]] = (ids for pair in repeat((LOOK, DONE)) for ids in pair)
    engine = FakeEngine(script, piece_tokens=3)
    door = Door(engine, HttpSettings(honours_sampling=True))
    started_s = time.monotonic()
    async with door.raw() as client:
        for number in range(num_cases):
            if number % 500 == 0:
                await renew(door)
                engine.requests.clear()
                client.headers["authorization"] = f"Bearer {door.key}"
            path, body = case(random.Random(f"{seed}/{number}"))
            answer = await client.post(path, content=body)
            try:
                check(path, answer)
            except Exception as error:
                raise AssertionError(f"case {number} of seed {seed}: {path} {body!r}") from error
            counts[f"{path} {answer.status_code}"] += 1
            if number % 10_000 == 9_999:
                tell(f"{number + 1} cases in {time.monotonic() - started_s:.0f} s")
    return counts


async def renew(door: Door) -> None:
    """Open another session, so that trees stay small."""
    await door.session.close()
    door.access.revoke(door.key)
    door.session = door.gateway.open(
        "fuzz", sampling=SAMPLING, thinking=True, max_context_tokens=1 << 16
    )
    door.key = door.access.admit(door.session)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = asyncio.run(
        fuzz(arguments.cases, arguments.seed, lambda text: sys.stderr.write(text + "\n"))
    )
    for name, count in sorted(counts.items()):
        sys.stdout.write(f"{name:40} {count}\n")


if __name__ == "__main__":
    main()
