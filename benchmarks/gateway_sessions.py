"""What sessions of the gateway cost: memory of idle ones, processor time of long histories, time to wake up.

* idle session: growth of the process over many sessions of about 8,000 tokens, a fifth of them sampled, whose clients
  own their contexts; all but the newest rest. The bounded caches that all sessions share are filled before.
* long history: processor time of a request of 300 messages and 1.1 MB whose first 299 were sent before, in parts:
  reading its JSON, and answering it (identity, match, prefix check, rendering of the tail, log, tree). The engine
  returns its ids at once.
* rest and wake up: packing and unpacking one such idle session.
"""

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median

from common import positive

from longarc.gateway.chat_completions import ChatCompletions
from longarc.gateway.core import Gateway
from longarc.gateway.dialect import Surroundings
from longarc.gateway.session import GatewaySession
from longarc.gateway.turn_options import TurnOptions
from longarc.records.lineage import Lineage
from longarc.records.message import Message, Role
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource
from longarc.tokens.glm import GlmFormat
from longarc.tokens.tokenizer import Tokenizer

TURNS, SAMPLED_TOKENS, CONTEXT_TOKENS = 20, 80, 320
"""Of an idle session: turns, and tokens that each samples and adds [tokens]."""
MESSAGES, BODY_BYTES = 300, 1_100_000
MOST_KIB, MOST_MS = 64.0, 6.0


class InstantEngine:
    """Returns random ids at once."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Yield one piece; log-probabilities are those of single precision."""
        ids = tuple(self._rng.randrange(2000) for _ in range(SAMPLED_TOKENS))
        yield SampledTokens(
            token_ids=ids,
            logprobs=tuple(-self._rng.randrange(1 << 24) / (1 << 22) for _ in ids),
            policy_version=1,
            finish_reason="length",
        )

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Not needed here."""
        raise NotImplementedError

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Not needed here."""
        raise NotImplementedError

    async def health(self) -> EngineHealth:
        """Not needed here."""
        raise NotImplementedError


def resident_kib() -> int:
    """Memory of this process [KiB]."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def words() -> list[str]:
    """A vocabulary of its own."""
    rng = random.Random(3)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    return ["".join(rng.choice(letters) for _ in range(rng.randint(2, 9))) for _ in range(3000)]


class Workload:
    """Sessions that talk English-like text."""

    def __init__(self, tokenizer: Tokenizer, gateway: Gateway) -> None:
        self._tokenizer = tokenizer
        self._gateway = gateway
        self._rng = random.Random(2)
        self._words = words()

    def text(self, num_tokens: int) -> str:
        """Text of about as many tokens."""
        said: list[str] = []
        while num_tokens > 0:
            said.append(self._rng.choice(self._words))
            num_tokens -= len(self._tokenizer.encode(" " + said[-1]))
        return " ".join(said)

    async def session(self, name: str) -> GatewaySession:
        """Open a session and talk."""
        session = self._gateway.open(
            name,
            sampling=Sampling(max_new_tokens=SAMPLED_TOKENS),
            thinking=False,
            max_context_tokens=1 << 20,
        )
        history = [Message(role=Role.SYSTEM, content="You are an agent.")]
        for turn in range(TURNS):
            history.append(Message(role=Role.USER, content=self.text(CONTEXT_TOKENS)))
            options = TurnOptions(lineage=Lineage(), body_digest=f"{name} {turn}".encode())
            answer = await session.answer(history, options=options)
            history.append(answer.turn.message)
        return session


async def idle_kib(workload: Workload, *, num_sessions: int) -> tuple[float, int]:
    """Return the memory of an idle session [KiB], and its tokens."""
    for number in range(110):
        await workload.session(f"before {number}")
    gc.collect()
    before = resident_kib()
    for number in range(num_sessions):
        session = await workload.session(f"idle {number}")
    gc.collect()
    kib = (resident_kib() - before) / num_sessions
    return kib, len(session.segments()[0].token_ids)


def waking_ms(session: GatewaySession) -> tuple[float, float]:
    """Return how long it takes to pack and to unpack a session [ms]."""
    times: list[tuple[float, float]] = []
    for _ in range(9):
        began = time.perf_counter()
        session.rest()
        rested = time.perf_counter()
        session.payloads()
        times.append((rested - began, time.perf_counter() - rested))
    return 1e3 * median(t[0] for t in times), 1e3 * median(t[1] for t in times)


async def history_ms(workload: Workload, gateway: Gateway) -> tuple[float, float]:
    """Return the processor time of reading and of answering a long history [ms]."""
    session = gateway.open(
        "long", sampling=Sampling(max_new_tokens=80), thinking=False, max_context_tokens=1 << 30
    )
    filler = workload.text(1000)
    filler = (filler * (BODY_BYTES // MESSAGES // len(filler) + 1))[: BODY_BYTES // MESSAGES]
    wire = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {filler}"}
        for i in range(MESSAGES - 1)
    ]
    around = Surroundings(
        tokenizer=gateway.chat_format.tokenizer, created_s=0, history=session.history
    )
    times: list[tuple[float, float]] = []
    for number in range(12):
        body = json.dumps({"model": "m", "messages": wire}).encode()
        began = time.process_time()
        request = ChatCompletions().read(body, around).request
        read = time.process_time()
        answer = await session.answer(request.messages, options=TurnOptions(lineage=Lineage()))
        times.append((read - began, time.process_time() - read))
        wire += [
            {"role": "assistant", "content": answer.turn.message.content},
            {"role": "user", "content": f"go on {number}"},
        ]
    # The first one tokenises the whole history.
    return 1e3 * median(t[0] for t in times[1:]), 1e3 * median(t[1] for t in times[1:])


async def measure(num_sessions: int) -> int:
    """Measure and print; returns 1 where a bound is not kept."""
    tokenizer = Tokenizer.train(words(), vocab_size=2048)
    gateway = Gateway(InstantEngine(), GlmFormat(tokenizer), max_warm_bytes=1 << 20)
    workload = Workload(tokenizer, gateway)
    kib, num_tokens = await idle_kib(workload, num_sessions=num_sessions)
    rest_ms, wake_ms = waking_ms(gateway.session("idle 0"))
    read_ms, answer_ms = await history_ms(workload, gateway)
    print(f"idle session of {num_tokens} tokens: {kib:.1f} KiB (at most {MOST_KIB:g})")
    print(f"to pack it {rest_ms:.2f} ms, to unpack it and write its log {wake_ms:.2f} ms")
    print(
        f"{MESSAGES} messages, {BODY_BYTES / 1e6:.1f} MB, after the first: {read_ms:.2f} ms to read, "
        f"{answer_ms:.2f} ms to answer (together at most {MOST_MS:g})"
    )
    return int(kib > MOST_KIB or read_ms + answer_ms > MOST_MS)


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=positive, default=512)
    parser.add_argument("--quick", action="store_true", help="32 sessions")
    arguments = parser.parse_args()
    return asyncio.run(measure(32 if arguments.quick else arguments.sessions))


if __name__ == "__main__":
    sys.exit(main())
