"""The engine of a random conversation, which records what it does, and what may be said; clients are in drift_wires."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from longarc.errors import EngineError
from longarc.records.message import ToolSpec
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource
from longarc.tokens.tokenizer import Tokenizer
from token_samples import BASH

DEEP = ToolSpec(
    name="store",
    description="Store data; Größe ≤ 1 «MB».",
    parameters={
        "type": "object",
        "properties": {
            "data": {"type": "object"},
            "note": {"type": "string"},
            "n": {"type": "number"},
        },
    },
)
TOOLS = (BASH, DEEP)
OPTIONS: dict[str, Any] = {
    "sampling": Sampling(max_new_tokens=4000, seed=7),
    "thinking": True,
    "max_context_tokens": 1 << 30,
}
MOVES = ("on",) * 9 + (
    "edit", "rewind", "fold", "compact", "side", "sub", "again", "kill", "fail", "reminder"
)  # fmt: skip
WORDS = (
    "a", "the word", "  two blanks", "tail ", "\n", "\r\n", "\t", "é", "é", "日本語", "🙂‍🔥", "שלום", "\u200b", "ﬁ",
    "\x00", "\u2028", "{", '"}', "<think>", "</think>", "<tool_call>", "</arg_value>", "<|user|>", "<|im_end|>",
    "\\u0041", "&amp;", "null", "-0.0", "1e5", "x" * 40,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """What the engine saw and sampled in one request."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass
class RecordingEngine:
    """Samples whatever a random model of the format might, in pieces of random length and version."""

    tokenizer: Tokenizer
    is_glm: bool
    rng: random.Random
    opens_thinking: bool = True
    """Whether the prompt opens the reasoning; the model does so itself otherwise, mostly."""
    records: list[Record] = field(default_factory=list)
    fails: bool = False
    """Whether the next request ends in the middle."""
    says: str | None = None
    """Content of the next answer."""

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        rng, says = self.rng, self.says
        fails, self.fails, self.says = self.fails, False, None
        ids = self._completion(says)
        stops = [i for i, token in enumerate(ids) if token in sampling.stop_ids]
        ids = ids[: stops[0] + 1] if stops else ids
        logprobs = [-rng.random() * 9 for _ in ids]
        versions: list[int] = []
        version, start = rng.randrange(5), 0
        while start < len(ids):
            await asyncio.sleep(0)
            end = min(len(ids), start + rng.randint(1, 9))
            if fails and end * 2 > len(ids):
                raise EngineError("the engine is lost")
            version += rng.random() < 0.2
            versions += [version] * (end - start)
            if end == len(ids):
                self.records.append(
                    Record(tuple(prompt_ids), tuple(ids), tuple(logprobs), tuple(versions))
                )
            yield SampledTokens(
                token_ids=tuple(ids[start:end]),
                logprobs=tuple(logprobs[start:end]),
                policy_version=version,
                finish_reason=None if end < len(ids) else "stop" if stops else "length",
            )
            start = end

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        raise NotImplementedError

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        raise NotImplementedError

    async def health(self) -> EngineHealth:
        raise NotImplementedError

    def _completion(self, says: str | None) -> list[int]:
        rng, tokenizer = self.rng, self.tokenizer
        if says is None and rng.random() < 0.1:
            return [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 30))]
        parts: list[tuple[str, bool]] = []
        if not self.opens_thinking and rng.random() < 0.95:
            parts.append(("<think>", True))
        if rng.random() < 0.7:
            parts.append((text(rng), False))
        parts.append(("</think>", True))
        parts.append((says if says is not None else text(rng) if rng.random() < 0.8 else "", False))
        for _ in range(0 if says is not None else rng.choice((0, 0, 1, 1, 2, 3))):
            parts += self._call()
        if rng.random() < 0.9:
            glm_stop = rng.choice(("<|user|>", "<|observation|>", "<|endoftext|>"))
            parts.append((glm_stop if self.is_glm else "<|im_end|>", True))
        ids: list[int] = []
        for part, is_control in parts:
            ids += [tokenizer.special_id(part)] if is_control else misspelt(part, tokenizer, rng)
        return ids or [0]

    def _call(self) -> list[tuple[str, bool]]:
        rng = self.rng
        arguments = {
            "data": {text(rng): value(rng)},
            "note": text(rng),
            "n": rng.choice((1, 2.5, 2.0, -3)),
        }
        if not self.is_glm:
            call = json.dumps(
                {"name": "store", "arguments": arguments}, ensure_ascii=rng.random() < 0.5
            )
            if rng.random() < 0.1:
                call = call[:-2]
            return [("<tool_call>", True), (f"\n{call}\n", False), ("</tool_call>", True)]
        parts = [("<tool_call>", True), ("store", False)]
        for name, argument in arguments.items():
            spelt = (
                argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)
            )
            parts += [("<arg_key>", True), (name, False), ("</arg_key>", True)]
            parts += [("<arg_value>", True), (spelt, False), ("</arg_value>", True)]
        return parts if rng.random() < 0.1 else [*parts, ("</tool_call>", True)]


def text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 6)))


def value(rng: random.Random, depth: int = 0) -> Any:
    """A nested JSON value."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 7:
        return {text(rng): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    return (
        None,
        True,
        rng.randrange(-9, 10**20),
        rng.random() * 1e3,
        float(rng.randrange(9)),
        text(rng),
    )[kind]


def misspelt(words: str, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Ids that decode to a text and are mostly not those of its encoding."""
    ids: list[int] = []
    while words:
        cut = rng.randint(1, 12)
        ids += tokenizer.encode(words[:cut])
        words = words[cut:]
    return ids
