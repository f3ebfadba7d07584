"""Real agent programs against the embedded engine: the engine, who plays the model, and the proof of exactness.

A small random model talks nonsense, so ``ScriptedPolicy`` plays the model where a task has to be solved. It stands
behind the engine port, chooses what is said from the prompt's text, spells it in tokens that no tokenizer would
choose, and takes their log-probabilities from the embedded engine, which reads the very prompt for it.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from longarc.config.engine import EngineConfig
from longarc.config.model import LlamaConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.token_text import TokenText
from longarc.envs.harnesses.family import HarnessFamily, HarnessLimits
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.envs.tasks.files import Files
from longarc.errors import EngineError
from longarc.gateway.core import Gateway
from longarc.gateway.rollouts import RolloutSessions
from longarc.models.build import build_model
from longarc.orchestrator.rollout import RolloutSpec, run_rollout
from longarc.records.message import Message, Role, ToolCall
from longarc.records.ports import Harness
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource
from longarc.records.segment import Segment, SegmentKind
from longarc.records.task import Task
from longarc.records.trajectory import Admission, Trajectory
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.glm import GlmFormat
from longarc.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
CONTEXT = 1 << 17
VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Seen:
    """What the engine saw and sampled in one request."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass
class RecordingEngine:
    """Writes down what another engine sees and samples."""

    engine: Any
    seen: list[Seen] = field(default_factory=list)
    num_begun: int = 0

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        self.num_begun += 1
        pieces: list[SampledTokens] = []
        async for piece in self.engine.stream(prompt_ids, sampling, session_id=session_id):
            pieces.append(piece)
            if piece.finish_reason is not None:
                self.seen.append(
                    Seen(
                        tuple(prompt_ids),
                        tuple(i for p in pieces for i in p.token_ids),
                        tuple(x for p in pieces for x in p.logprobs),
                        tuple(p.policy_version for p in pieces for _ in p.token_ids),
                    )
                )
            yield piece

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        return await self.engine.score(token_ids, temperature=temperature)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        await self.engine.update_weights(source, policy_version=policy_version)

    async def health(self) -> EngineHealth:
        return await self.engine.health()


@dataclass(frozen=True)
class Say:
    """One answer of the scripted policy."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    reasoning: str = "so"


Decide = Callable[[str], Say]
"""Chooses what to say from the text of the prompt."""


@dataclass
class ScriptedPolicy:
    """Plays the model behind the engine port; the log-probabilities are those of the engine behind it."""

    engine: Any
    format: ChatFormat
    decide: Decide
    thinking: bool
    prompts: list[str] = field(default_factory=list)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        prompt = self.format.tokenizer.decode(list(prompt_ids), keep_special=True)
        self.prompts.append(prompt)
        ids = spelled(self.format, self.decide(prompt), thinking=self.thinking, seed=len(prompt))
        opening = self.format.call_opening(None, thinking=self.thinking)
        if opening and tuple(prompt_ids)[-len(opening) :] == tuple(opening):
            # The request wants a call, whose beginning stands in the prompt: the rest of it is said.
            ids = ids[ids.index(opening[-1]) + 1 :]
        if len(ids) > sampling.max_new_tokens:
            raise EngineError(
                f"the script says {len(ids)} tokens, the request allows {sampling.max_new_tokens}"
            )
        logprobs = (await self.engine.score([*prompt_ids, *ids]))[len(prompt_ids) :]
        version = (await self.engine.health()).policy_version
        for start in range(0, len(ids), 7):
            await asyncio.sleep(0)
            end = min(start + 7, len(ids))
            yield SampledTokens(
                token_ids=tuple(ids[start:end]),
                logprobs=tuple(logprobs[start:end]),
                policy_version=version,
                finish_reason="stop" if end == len(ids) else None,
            )

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        return await self.engine.score(token_ids, temperature=temperature)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        await self.engine.update_weights(source, policy_version=policy_version)

    async def health(self) -> EngineHealth:
        return await self.engine.health()


def spelled(chat_format: ChatFormat, said: Say, *, thinking: bool, seed: int) -> list[int]:
    """Ids of an answer with its stop id, in which text is cut where no tokenizer would cut it."""
    question = Message(role=Role.USER, content="?")
    calls = tuple(
        ToolCall(id=f"c{i}", name=name, arguments=arguments)
        for i, (name, arguments) in enumerate(said.calls)
    )
    answer = Message(
        role=Role.ASSISTANT,
        content=said.text,
        reasoning=said.reasoning if thinking else None,
        tool_calls=calls,
    )
    options: dict[str, Any] = {"thinking": thinking, "clear_thinking": False}
    before = chat_format.render([question], add_generation_prompt=True, **options).token_ids
    whole = chat_format.render([question, answer], add_generation_prompt=False, **options).token_ids
    assert whole[: len(before)] == before
    rng = random.Random(seed)
    tokenizer = chat_format.tokenizer
    special = set(tokenizer.special_tokens.values())
    ids: list[int] = []
    run: list[int] = []

    def flush() -> None:
        text = tokenizer.decode(run)
        while text:
            cut = rng.randint(1, 9)
            ids.extend(tokenizer.encode(text[:cut]))
            text = text[cut:]
        run.clear()

    for token in whole[len(before) :]:
        if token in special:
            flush()
            ids.append(token)
        else:
            run.append(token)
    flush()
    return ids


@cache
def tokenizer() -> Tokenizer:
    """A small BPE with GLM's control tokens, trained on the sources of this project."""
    files = [*sorted((ROOT / "src/longarc").rglob("*.py"))[:120], ROOT / "README.md"]
    return Tokenizer.train([file.read_text() for file in files], vocab_size=VOCABULARY)


def embedded(chat_format: ChatFormat) -> EmbeddedEngine:
    """The embedded engine over a small random model with room for the longest prompts of these programs."""
    model = build_model(
        LlamaConfig(
            vocab_size=chat_format.tokenizer.vocab_size,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            max_position_embeddings=CONTEXT,
            initializer_range=0.15,
        ),
        seed=0,
    )
    return EmbeddedEngine(
        model,
        EngineConfig(cache_tokens=2 * CONTEXT, max_running=8),
        max_context_tokens=CONTEXT,
        policy_version=3,
        attention="dense",
        text=TokenText.of(chat_format.tokenizer, vocab_size=model.config.vocab_size),
    )


@dataclass(frozen=True)
class Trail:
    """Plays a model that follows the trail of a ``files`` task; satisfies ``Decide``."""

    task: Task
    call: Callable[[str], tuple[str, dict[str, Any]]]
    """How the program's tool is called with a command."""
    say: Callable[[str], Say] | None = None
    """Says the code, where that is not the last message."""
    step_of: Callable[[str], int] = lambda prompt: prompt.count("<|observation|>")
    """How many commands were run, as the prompt tells."""

    @property
    def steps(self) -> list[str]:
        return [str(step) for step in self.task.data["steps"]]

    @property
    def code(self) -> str:
        return f"code: {self.task.data['code']}"

    def __call__(self, prompt: str) -> Say:
        if "title generator" in prompt:
            return Say("Find the code")
        step = self.step_of(prompt)
        if step < len(self.steps):
            return Say("next", (self.call(self.steps[step]),))
        return Say(self.code) if self.say is None else self.say(self.code)


def trail_task(cursor: int = 3) -> Task:
    """A task of three commands."""
    return next(islice(Files().tasks("train", cursor=cursor), 1))


@dataclass(frozen=True)
class Played:
    """One rollout of a program."""

    trajectory: Trajectory
    seen: list[Seen]
    prompts: list[str]
    """What the scripted policy was asked."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.trajectory.segments

    @property
    def lineage(self) -> list[tuple[str, str, int, int | None]]:
        """Kind, agent, window and parent of each segment."""
        return [(s.kind.value, s.agent_id, s.window, s.parent) for s in self.segments]


async def play(
    harness: Harness,
    decide: Decide | None,
    *,
    task: Task | None = None,
    thinking: bool = True,
    max_new_tokens: int = 2048,
    max_context_tokens: int = CONTEXT,
    limits: HarnessLimits | None = None,
) -> Played:
    """Run a program on a task in a real box; without a script the embedded engine's own tokens are the answers."""
    chat_format = GlmFormat(tokenizer())
    sandboxes = BwrapBackend()
    async with embedded(chat_format) as engine:
        policy = None if decide is None else ScriptedPolicy(engine, chat_format, decide, thinking)
        recording = RecordingEngine(policy or engine)
        family = HarnessFamily(Files(), harness, limits)
        family.thinking = thinking
        try:
            trajectory = await run_rollout(
                admission_of(task or trail_task()),
                family,
                RolloutSessions(Gateway(recording, chat_format)),
                sandboxes,
                spec=RolloutSpec(
                    sampling=Sampling(max_new_tokens=max_new_tokens, stop_ids=chat_format.stop_ids),
                    max_context_tokens=max_context_tokens,
                    timeout_s=240.0,
                    grader_timeout_s=10.0,
                ),
                clock=time.time,
            )
        finally:
            await sandboxes.close()
    return Played(trajectory, recording.seen, [] if policy is None else policy.prompts)


def admission_of(task: Task) -> Admission:
    return Admission(
        trajectory_id="rl/0/0/0",
        stage="rl",
        group_id="rl/0",
        group_index=0,
        member_index=0,
        attempt=0,
        task=task,
        policy_version=3,
        seed=5,
    )


def check_exact(segments: Iterable[Segment], seen: Sequence[Seen]) -> int:
    """Prove that segments hold what the engine saw and sampled, each sampled token once; return the trained tokens.

    Each answer of the engine stands in exactly one segment that owns it, behind exactly the prompt that the engine
    saw; what other segments share of it is context there.
    """
    left = list(seen)
    num_trained = 0
    for segment in segments:
        trains = segment.train_mask if segment.kind is not SegmentKind.SIDE else segment.is_sampled
        owned = [s for s in left if _stands_in(segment, s, trains)]
        for answer in owned:
            left.remove(answer)
        num_owned = sum(len(answer.ids) for answer in owned)
        if segment.kind is SegmentKind.SIDE:
            assert segment.num_trained_tokens == 0
            num_owned = 0
        assert segment.num_trained_tokens == num_owned, "a trained token that no answer explains"
        num_trained += num_owned
    assert not left, f"{len(left)} of {len(seen)} answers stand in no segment"
    return num_trained


def _stands_in(segment: Segment, seen: Seen, trains: Sequence[bool]) -> bool:
    start, end = len(seen.prompt), len(seen.prompt) + len(seen.ids)
    if not (
        segment.token_ids[:start] == seen.prompt
        and segment.token_ids[start:end] == seen.ids
        and all(segment.is_sampled[start:end])
        and all(trains[start:end])
    ):
        return False
    assert segment.behaviour_logprobs[start:end] == seen.logprobs
    assert segment.policy_versions[start:end] == seen.versions
    return True
