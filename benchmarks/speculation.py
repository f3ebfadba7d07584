"""Speculative decoding in the engine: how long chains of drafts really are, and what they gain in time.

The second part of ``drafts.py``. Tasks of the run's own families that nobody has seen are answered at temperature 1, with
the chat format's stop ids. The gain is the whole engine's with drafts and without, in turns; the prompts are in its cache
by then, as those of a group or a later turn are, because drafts gain nothing in a prefill.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common import Table

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


async def answers(
    model: GlmMoeDsa,
    attention: Attention,
    tasks: Tasks,
    *,
    num_drafts: int,
    batch: int,
    ends_early: bool = True,
) -> tuple[EngineHealth, float]:
    """Answer every task, ``batch`` at a time; return what the engine says then, and the seconds without prefill.

    Chains end early as by default, or not at all.
    """
    settings = {} if ends_early else {"min_draft_probability": 0.0}
    config = EngineConfig(
        cache_tokens=CACHE,
        max_running=batch,
        num_speculative_tokens=num_drafts,
        **settings,
    )
    async with EmbeddedEngine(
        model, config, max_context_tokens=MAX_CONTEXT, attention=attention
    ) as engine:
        waiting: list[tuple[int, Sequence[int]]] = []

        async def answer(max_new: int) -> None:
            while waiting:
                index, prompt = waiting.pop()
                sampling = Sampling(max_new_tokens=max_new, stop_ids=tasks.stop_ids, seed=index)
                async for _ in engine.stream(prompt, sampling, session_id=str(index)):
                    pass

        seconds = 0.0
        for max_new in (1, MAX_NEW):
            waiting += enumerate(tasks.prompts)
            started = time.perf_counter()
            await asyncio.gather(*(answer(max_new) for _ in range(batch)))
            seconds = time.perf_counter() - started
        return await engine.health(), seconds


def speed(
    model: GlmMoeDsa, attention: Attention, tasks: Tasks, *, batch: int, repeats: int
) -> tuple[float, float, float]:
    """Return tokens/s with drafts and without, medians, and the median of the ratios of neighbouring turns."""
    found: dict[int, list[float]] = {NUM_DRAFTS: [], 0: []}
    for _ in range(repeats):
        for num_drafts, speeds in found.items():
            health, seconds = asyncio.run(
                answers(model, attention, tasks, num_drafts=num_drafts, batch=batch)
            )
            speeds.append((health.num_sampled_tokens - len(tasks.prompts)) / seconds)
    ratios = [a / b for a, b in zip(found[NUM_DRAFTS], found[0], strict=True)]
    with_drafts, without = (statistics.median(speeds) for speeds in found.values())
    return with_drafts, without, statistics.median(ratios)


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
    health, _ = asyncio.run(
        answers(model, attention, tasks, num_drafts=NUM_DRAFTS, batch=32, ends_early=False)
    )
    length = health.accept_length_tokens
    table.row(
        f"engine, {model.config.num_hidden_layers} layers, {len(tasks.prompts)} unseen tasks: accept length of {NUM_DRAFTS} drafts [tokens]",
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
    """Print the gain at each batch size; there is a bar for the deep model alone."""
    num_layers = model.config.num_hidden_layers
    for batch in BATCHES:
        ours, plain, gain = speed(model, attention, tasks, batch=batch, repeats=repeats)
        has_bar = num_layers >= DEEP
        table.row(
            f"engine, {num_layers} layers, batch {batch}: {NUM_DRAFTS} drafts [tokens/s]",
            f"{ours:,.0f}",
            peer=f"no drafts {plain:,.0f}",
            ratio=gain,
            bar=f"{LEAST_GAIN}x" if has_bar else "-",
            holds=gain >= LEAST_GAIN if has_bar else None,
        )
