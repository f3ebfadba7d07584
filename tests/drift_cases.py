"""Random conversations of a black-box client with a gateway, and the proof that no token drifted.

A client speaks one of the three dialects, now and then all of them in one session. It brings answers back as they
were told, or spells its history anew with every request, as real ones do: other key orders and numbers, content as
parts, cache marks that move, ids and fields of its own, reasoning left out. It also edits, goes back, folds, compacts, asks beside the work, starts sub-agents, asks again, and the
gateway is killed now and then. The engine records what it saw and sampled; ``check`` compares.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from drift_parts import MOVES, OPTIONS, TOOLS, RecordingEngine, text
from drift_wires import WIRES, Wire
from longarc.errors import EngineError
from longarc.gateway.core import Gateway
from longarc.gateway.dialect import Exchange, Surroundings
from longarc.gateway.session import Answer, GatewaySession
from longarc.gateway.tree import id_array
from longarc.gateway.turn_options import TurnOptions
from longarc.records.lineage import Lineage
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.sampling import SampledTokens
from longarc.records.segment import SegmentKind
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.glm import GlmFormat
from longarc.tokens.renderer_format import RendererFormat
from longarc.tokens.template_format import TemplateFormat
from longarc.tokens.tokenizer import GLM_SPECIAL_TOKENS
from template_cases import GROWING, template_format
from token_samples import BASH, qwen_tokenizer, small_tokenizer


@dataclass
class Context:
    """One history of the client, and which record each of its own answers is."""

    messages: list[Message]
    answers: dict[int, int] = field(default_factory=dict)
    """Record by position of the answer; one that was edited has none, nor has what follows it."""

    @property
    def expected(self) -> int | None:
        """The record that the next prompt has to extend."""
        return self.answers[max(self.answers)] if self.answers else None

    def cut(self, length: int) -> "Context":
        """The history up to a length."""
        kept = {at: record for at, record in self.answers.items() if at < length}
        return Context(self.messages[:length], kept)


@cache
def chat_formats() -> tuple[tuple[ChatFormat, bool], ...]:
    """Formats with whether they are GLM's."""
    assert set(GLM_SPECIAL_TOKENS)
    return (
        (GlmFormat(small_tokenizer()), True),
        (GlmFormat(small_tokenizer(), version="glm-4.5"), True),
        (GlmFormat(small_tokenizer(), version="glm-5.2"), True),
        (ChatMlFormat(qwen_tokenizer()), False),
        (template_format(GROWING), False),
    )


class DriftError(AssertionError):
    """A token, a prefix or a record is not what it has to be."""


class Conversation:
    """One random session from its first request to the check of its segments."""

    def __init__(self, seed: int, formats: Sequence[tuple[ChatFormat, bool]] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(f"drift/{seed}")
        chat_format, is_glm = self.rng.choice(formats or chat_formats())
        self.format = chat_format
        tags = chat_format.streamed_tags
        self.engine = RecordingEngine(
            chat_format.tokenizer,
            is_glm,
            self.rng,
            opens_thinking=tags is None or tags.opens_thinking,
        )
        self.wires = [wire(self.rng) for wire in WIRES]
        self.own_wire = self.rng.choice(self.wires)
        self.mixes = self.rng.random() < 0.2
        """Whether requests of one session come in different dialects."""
        self.lineage = Lineage() if self.rng.random() < 0.7 else None
        self.counts: Counter[str] = Counter()
        self.side_records: set[int] = set()
        self.session = self._opened(None)
        self._num_said = 0

    async def play(self) -> None:
        """Talk, then check."""
        rng = self.rng
        main = Context([self._says(Role.SYSTEM), self._says(Role.USER)])
        sub: Context | None = None
        main = await self._ask(main)
        for _ in range(rng.randint(2, 8)):
            move = rng.choice(MOVES)
            self.counts[move] += 1
            if move == "sub":
                opening = Context([self._says(Role.SYSTEM), self._says(Role.USER)])
                sub = await self._ask(opening if sub is None else self._on(sub), tools=(BASH,))
            elif move == "kill":
                self._kill()
            else:
                main = await self._moved(move, main)
        self.check()

    async def _moved(self, move: str, main: Context) -> Context:
        match move:
            case "edit":
                return await self._ask(self._on(self._edited(main)))
            case "rewind":
                return await self._ask(self._on(self._rewound(main)))
            case "fold":
                return await self._ask(self._on(self._folded(main)))
            case "compact":
                return await self._compacted(main)
            case "side":
                return await self._beside(main)
            case "again":
                return await self._asked_again(self._on(main))
            case "fail":
                return await self._failed(self._on(main))
            case "reminder":
                return await self._ask(self._on(main, ends=(Role.SYSTEM,)))
            case _:
                return await self._ask(self._on(main))

    def _opened(self, payloads: tuple[bytes, ...] | None) -> GatewaySession:
        gateway = Gateway(self.engine, self.format, repeat_window_s=60.0, max_warm_bytes=0)
        if payloads is None:
            return gateway.open("s", **OPTIONS)
        return gateway.restore("s", payloads, **OPTIONS)

    def _kill(self) -> None:
        before = self.session
        payloads = before.payloads()
        self.session = self._opened(payloads)
        self._same(self.session.payloads(), payloads, "the log after a restart")
        self._same(self.session.segments(), before.segments(), "the segments after a restart")

    def _says(self, role: Role, call_id: str | None = None) -> Message:
        self._num_said += 1
        said = f"{text(self.rng)}§{self._num_said}§{text(self.rng)}"
        return Message(role=role, content=said, tool_call_id=call_id)

    def _on(self, context: Context, *, ends: tuple[Role, ...] = ()) -> Context:
        """What the client sends after an answer."""
        last = context.messages[-1]
        said = [self._says(Role.TOOL, call.id) for call in last.tool_calls]
        if not said or self.rng.random() < 0.2:
            said.append(self._says(Role.USER))
        said += [self._says(role) for role in ends]
        return Context([*context.messages, *said], dict(context.answers))

    def _edited(self, context: Context) -> Context:
        at = self.rng.choice(
            [i for i, m in enumerate(context.messages) if m.role is Role.ASSISTANT]
        )
        kept = context.cut(at)
        old = context.messages[at]
        changed = replace(old, content=old.content + self.rng.choice(("!", " ", "\n", "é")))
        return Context([*kept.messages, changed, *context.messages[at + 1 :]], kept.answers)

    def _rewound(self, context: Context) -> Context:
        own = [i for i, m in enumerate(context.messages) if m.role is Role.ASSISTANT]
        return context.cut(self.rng.choice(own) + 1)

    def _folded(self, context: Context) -> Context:
        at = next(i for i, m in enumerate(context.messages) if m.role in (Role.TOOL, Role.USER))
        kept = context.cut(at)
        folded = replace(context.messages[at], content=f"folded §{self._num_said}§")
        return Context([*kept.messages, folded, *context.messages[at + 1 :]], kept.answers)

    async def _compacted(self, context: Context) -> Context:
        asks = Message(
            role=Role.USER, content="Your task is to create a detailed summary of the conversation."
        )
        self.engine.says = (
            f"All that was found up to now stands in file {self._num_said} of the archive."
        )
        summary = await self._ask(
            Context([*self._on(context).messages, asks], dict(context.answers))
        )
        told = Message(role=Role.USER, content=f"So far: {summary.messages[-1].content}")
        return await self._ask(Context([context.messages[0], told, self._says(Role.USER)]))

    async def _beside(self, context: Context) -> Context:
        title = Message(role=Role.SYSTEM, content="You are a title generator.")
        one, _ = await asyncio.gather(
            self._ask(self._on(context)),
            self._ask(Context([title, self._says(Role.USER)]), tools=(), is_side=True),
        )
        return one

    async def _asked_again(self, context: Context) -> Context:
        """Send one request several times, at once and afterwards; it is sampled once."""
        before = len(self.engine.records)
        key = self.rng.choice((None, "key §1§"))
        options = replace(
            self._options(), idempotency_key=key and f"{key}{before}", body_digest=b"%d" % before
        )
        wire, exchange = self._sent(context.messages, TOOLS)
        messages = exchange.request.messages
        first, second = await asyncio.gather(
            self.session.answer(messages, tools=TOOLS, options=options),
            self.session.answer(messages, tools=TOOLS, options=options),
        )
        if self.rng.random() < 0.5:
            self._kill()
        again = await self.session.answer(
            messages, tools=TOOLS, options=replace(options, is_retry=self.rng.random() < 0.5)
        )
        self._same(len(self.engine.records), before + 1, "how often a repeated request was sampled")
        for other in (second, again):
            self._same(
                other.node.sampled_ids, first.node.sampled_ids, "the ids of a repeated request"
            )
            self._same(other.turn, first.turn, "the answer to a repeated request")
        return self._answered(context, first, wire, exchange)

    async def _failed(self, context: Context) -> Context:
        self.engine.fails = True
        before = self.session.payloads()
        try:
            await self._ask(context)
        except EngineError:
            self._same(self.session.payloads(), before, "the log after a failure")
            return await self._ask(context)
        raise DriftError(f"seed {self.seed}: the engine did not fail")

    def _options(self) -> TurnOptions:
        seen: list[int] = []
        streams = self.rng.random() < 0.3

        def on_progress(part: object) -> None:
            if isinstance(part, SampledTokens):
                seen.extend(part.token_ids)

        return TurnOptions(lineage=self.lineage, on_progress=on_progress if streams else None)

    async def _ask(
        self, context: Context, *, tools: tuple[ToolSpec, ...] = TOOLS, is_side: bool = False
    ) -> Context:
        wire, exchange = self._sent(context.messages, tools)
        request = exchange.request
        answer = await self.session.answer(
            request.messages, tools=request.tools, options=self._options()
        )
        answered = self._answered(context, answer, wire, exchange)
        if is_side and self.lineage is not None:
            self.side_records.add(answered.answers[len(context.messages)])
        return answered

    def _sent(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Wire, Exchange]:
        """A conversation as a codec reads it from the client's spelling, which it may have seen before."""
        around = Surroundings(
            tokenizer=self.format.tokenizer, created_s=0, history=self.session.history
        )
        wire = self.rng.choice(self.wires) if self.mixes else self.own_wire
        self.counts[type(wire).__name__] += 1
        return wire, wire.dialect.read(wire.body(messages, tools), around)

    def _answered(
        self, context: Context, answer: Answer, wire: Wire, exchange: Exchange
    ) -> Context:
        number = next(
            i
            for i, record in reversed(list(enumerate(self.engine.records)))
            if hashlib.blake2b(id_array(record.prompt + record.ids), digest_size=16).digest()
            == answer.node.ids_digest
        )
        record = self.engine.records[number]
        if context.expected is not None:
            parent = self.engine.records[context.expected]
            stored = parent.prompt + parent.ids
            if answer.node.parent is None and isinstance(
                self.format, TemplateFormat | RendererFormat
            ):
                # It may show the turn otherwise, such as one with a stray tag: then it is a branch.
                self.counts["rewritten"] += 1
            else:
                self._same(record.prompt[: len(stored)], stored, "the prefix of a prompt")
        message = answer.turn.message
        wire.hear(message, exchange.whole([answer]))
        return Context(
            [*context.messages, message], {**context.answers, len(context.messages): number}
        )

    def check(self) -> None:
        """Compare the segments with what the engine recorded, token by token."""
        segments = self.session.segments()
        restored = self._opened(self.session.payloads())
        self._same(restored.segments(), segments, "the segments of the log")
        records = self.engine.records
        times_trained: Counter[tuple[int, int]] = Counter()
        for segment in segments:
            at: dict[int, tuple[int, int]] = {}
            for number, record in enumerate(records):
                start, end = len(record.prompt), len(record.prompt) + len(record.ids)
                if segment.token_ids[:end] == record.prompt + record.ids:
                    at |= {start + i: (number, i) for i in range(end - start)}
            for position, is_sampled in enumerate(segment.is_sampled):
                if not is_sampled:
                    self._same(segment.train_mask[position], False, "the mask of a context token")
                    continue
                number, i = at[position]
                self._same(segment.token_ids[position], records[number].ids[i], "a token")
                self._same(
                    segment.behaviour_logprobs[position],
                    records[number].logprobs[i],
                    "a log-probability",
                )
                self._same(
                    segment.policy_versions[position], records[number].versions[i], "a version"
                )
                times_trained[number, i] += segment.train_mask[position]
        for number, record in enumerate(records):
            expected = 0 if number in self.side_records else 1
            for i in range(len(record.ids)):
                self._same(
                    times_trained[number, i],
                    expected,
                    f"how often token {i} of request {number} is trained",
                )
        if self.lineage is not None and self.side_records:
            assert any(s.kind is SegmentKind.SIDE for s in segments)
        self.counts["trained tokens"] += sum(s.num_trained_tokens for s in segments)
        self.counts["requests"] += len(records)
        self.counts["segments"] += len(segments)

    def _same(self, found: object, expected: object, what: str) -> None:
        if found != expected:
            raise DriftError(
                f"seed {self.seed}: {what} is {str(found)[:500]}, not {str(expected)[:500]}"
            )


async def play_all(seeds: range) -> Counter[str]:
    """Play conversations; returns how much of what there was."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        conversation = Conversation(seed)
        await conversation.play()
        counts += conversation.counts
    return counts
