"""Speculative decoding in the engine: how long chains of drafts really are, and what they gain in time.

The second part of ``drafts.py``. Tasks of the run's own families that nobody has seen are answered at temperature 1, with
the chat format's stop ids. Engines with drafts and without take turns, with one compute thread and with two, and the gain
is that of the faster one over the faster one: few rows leave a second thread idle, more rows do not. It is that of the whole
engine by the clock; the prompts are in its cache by then, as those of a group or a later turn are, because drafts gain
nothing in a prefill. The gain of decoding alone, which leaves out what comes before a task's second token, is there to be
read. A turn in which others had the cores is made again, whatever it would have said.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common import Table, processor_s_of_others

from longarc.config.engine import EngineConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Attention
from longarc.records.sampling import EngineHealth, Sampling
from longarc.trainer.packing import Document

NUM_DRAFTS = 4
LEAST_LENGTH = 2.2
"""Tokens of a chain of that many drafts."""
LEAST_GAIN = 1.3
MAX_NEW, MAX_CONTEXT, CACHE = 64, 4096, 131_072
BATCHES = (1, 2, 4)
THREADS = (1, 2)
PASSES = 3
"""As often all tasks are answered in a turn, each time with other seeds."""
MOST_OTHERS = 0.1
"""Share of a core that others may have had in a turn that counts."""
MOST_DISCARDED = 200
"""Turns that are made again at most; behind them all count."""
DEEP = 12
"""Layers of the variant whose gain has a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Prompts that the model can answer."""

    prompts: Sequence[Sequence[int]]
    stop_ids: tuple[int, ...]


def tasks_of(documents: Sequence[Document], stop_ids: tuple[int, ...]) -> Tasks:
    """Take what comes before each demonstration's first answer."""
    prompts = [
        document.token_ids[: document.train_mask.index(True)]
        for document in documents
        if True in document.train_mask
    ]
    return Tasks(
        prompts=[prompt for prompt in prompts if len(prompt) + MAX_NEW <= MAX_CONTEXT],
        stop_ids=stop_ids,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the engine did for all tasks, prompts in its cache beforehand."""

    health: EngineHealth
    whole_s: float
    """Time for all answers [seconds]."""
    first_s: float
    """Time for as many of one token: what is asked, planned and computed before decoding [seconds]."""
    num_answers: int
    num_tokens: int
    """Tokens of all answers."""
    others: float
    """Processor time of others over wall-clock time."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.whole_s

    @property
    def decoding_speed(self) -> float:
        """Tokens behind the first of each answer, per second of decoding."""
        return (self.num_tokens - self.num_answers) / (self.whole_s - self.first_s)


async def answers(
    model: GlmMoeDsa,
    attention: Attention,
    tasks: Tasks,
    *,
    num_drafts: int,
    batch: int,
    num_threads: int = 1,
    ends_early: bool = True,
) -> Answers:
    """Answer every task ``PASSES`` times, ``batch`` at a time, other seeds each time.

    Chains end early as by default, or not at all.
    """
    settings = {} if ends_early else {"min_draft_probability": 0.0}
    config = EngineConfig(
        cache_tokens=CACHE,
        max_running=batch,
        num_speculative_tokens=num_drafts,
        num_threads=num_threads,
        **settings,
    )
    async with EmbeddedEngine(
        model, config, max_context_tokens=MAX_CONTEXT, attention=attention
    ) as engine:
        waiting: list[tuple[int, Sequence[int]]] = []

        async def answer(max_new: int) -> None:
            while waiting:
                seed, prompt = waiting.pop()
                sampling = Sampling(max_new_tokens=max_new, stop_ids=tasks.stop_ids, seed=seed)
                async for _ in engine.stream(prompt, sampling, session_id=str(seed)):
                    pass

        async def passes(max_new: int, count: int) -> tuple[float, int]:
            before = (await engine.health()).num_sampled_tokens
            started = time.perf_counter()
            for number in range(count):
                waiting.extend(enumerate(tasks.prompts, start=number * len(tasks.prompts)))
                await asyncio.gather(*(answer(max_new) for _ in range(batch)))
            seconds = time.perf_counter() - started
            return seconds, (await engine.health()).num_sampled_tokens - before

        await passes(1, 1)  # fills the cache
        started, before_s = time.perf_counter(), processor_s_of_others()
        first_s, _ = await passes(1, PASSES)
        whole_s, num_tokens = await passes(MAX_NEW, PASSES)
        others_s = processor_s_of_others() - before_s
        return Answers(
            health=await engine.health(),
            whole_s=whole_s,
            first_s=first_s,
            num_answers=PASSES * len(tasks.prompts),
            num_tokens=num_tokens,
            others=others_s / (time.perf_counter() - started),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Tokens per second of one kind of engine, a number for each turn."""

    whole: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)


def undisturbed(turn: Callable[[], Answers], discarded: list[float]) -> Answers:
    """Return the first of its turns in which others left the cores alone; what others had in the rest is noted."""
    while True:
        done = turn()
        if done.others <= MOST_OTHERS or len(discarded) == MOST_DISCARDED:
            return done
        discarded.append(done.others)


def speeds(
    model: GlmMoeDsa, attention: Attention, tasks: Tasks, *, batch: int, repeats: int
) -> dict[tuple[int, int], Speeds]:
    """Measure engines by number of drafts and threads, in turns."""

    def turn(num_drafts: int, num_threads: int) -> Answers:
        asked = {"num_drafts": num_drafts, "batch": batch, "num_threads": num_threads}
        return asyncio.run(answers(model, attention, tasks, **asked))

    found = {(drafts, threads): Speeds() for drafts in (NUM_DRAFTS, 0) for threads in THREADS}
    discarded: list[float] = []
    for _ in range(repeats):
        for (num_drafts, num_threads), own in found.items():
            done = undisturbed(partial(turn, num_drafts, num_threads), discarded)
            own.whole.append(done.speed)
            own.decoding.append(done.decoding_speed)
    if discarded:
        ending = ", and then no more" if len(discarded) == MOST_DISCARDED else ""
        print(
            f"batch {batch}: others had {min(discarded):.2f} to {max(discarded):.2f} of a core in {len(discarded)} "
            f"turns, which were made again{ending}"
        )
    return found


def deepened(model: GlmMoeDsa, num_layers: int, *, seed: int) -> GlmMoeDsa:
    """Return the model with more layers behind its own, which say nothing yet: it computes the same.

    They start as copies of the last layer whose output projections are 0, so they have everything to learn from.
    """
    config = model.config.model_copy(
        update={"num_hidden_layers": num_layers, "num_nextn_predict_layers": 0}
    )
    deep = build_model(config, seed=seed, dtype=model.output_weight.dtype)
    assert isinstance(deep, GlmMoeDsa)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")}
    last = model.config.num_hidden_layers - 1
    for layer in range(last + 1, num_layers):
        for name, weight in model.model.layers[last].state_dict().items():
            is_output = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
            weights[f"model.layers.{layer}.{name}"] = weight * 0 if is_output else weight
    deep.load_state_dict(weights)
    return deep


def add_length_rows(table: Table, model: GlmMoeDsa, attention: Attention, tasks: Tasks) -> None:
    """Print how long chains are in the engine, and how often each depth stays."""
    done = asyncio.run(
        answers(model, attention, tasks, num_drafts=NUM_DRAFTS, batch=32, ends_early=False)
    )
    health, num_layers = done.health, model.config.num_hidden_layers
    length = health.accept_length_tokens
    table.row(
        f"engine, {num_layers} layers, {len(tasks.prompts)} unseen tasks: accept length of {NUM_DRAFTS} drafts [tokens]",
        f"{length:.3f}",
        bar=f"{LEAST_LENGTH}",
        holds=length >= LEAST_LENGTH,
    )
    stayed = zip(health.num_accepted, health.num_drafted, strict=True)
    table.row(
        "the same: drafts that stayed, by depth [share]",
        ", ".join(f"{a / d:.3f}" for a, d in stayed),
    )


def add_speed_rows(
    table: Table, model: GlmMoeDsa, attention: Attention, tasks: Tasks, *, repeats: int
) -> None:
    """Print the gain at each batch size; there is a bar for the whole engine with the deep model."""
    num_layers = model.config.num_hidden_layers
    for batch in BATCHES:
        found = speeds(model, attention, tasks, batch=batch, repeats=repeats)
        for kind in ("whole", "decoding"):
            has_bar = kind == "whole" and num_layers >= DEEP
            of_kind = {key: getattr(own, kind) for key, own in found.items()}
            best = {
                drafts: max(
                    (of_kind[drafts, threads] for threads in THREADS), key=statistics.median
                )
                for drafts in (NUM_DRAFTS, 0)
            }
            gain = statistics.median(best[NUM_DRAFTS]) / statistics.median(best[0])
            table.row(
                f"engine, {num_layers} layers, batch {batch}, {kind}: {NUM_DRAFTS} drafts, "
                f"{' and '.join(map(str, THREADS))} threads [tokens/s]",
                ", ".join(_spread(of_kind[NUM_DRAFTS, threads]) for threads in THREADS),
                peer=f"no drafts {', '.join(_spread(of_kind[0, threads]) for threads in THREADS)}",
                ratio=gain,
                bar=f"{LEAST_GAIN}x" if has_bar else "-",
                holds=gain >= LEAST_GAIN if has_bar else None,
            )


def _spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):,.0f} ({min(numbers):,.0f} to {max(numbers):,.0f})"
