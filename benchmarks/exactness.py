"""Engine against trainer at lag 0: do both compute the same log-probability for every sampled token?

The embedded engine samples 10,000 tokens from ``longarc-nano`` with mixed prompt lengths, prompts shared in
groups (prefix hits), requests that come and go, contexts beyond ``index_topk``, and so few pages that sequences
are preempted and computed again. The trainer then scores
the same tokens, packed at random, shared prompts computed once. A token that differs by more than
1e-5 nats is counted as a flip of its key selection.

Usage: python benchmarks/exactness.py [--tokens 10000] [--seed 0] [--quick]
"""

import argparse
import asyncio
import random
from dataclasses import dataclass

import torch
from common import Table, natural, positive

from longarc.config.engine import EngineConfig
from longarc.config.model import GlmMoeDsaConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.kernels.native import native
from longarc.models.layout import Layout, Span
from longarc.models.projection import token_logprobs
from longarc.records.sampling import EngineHealth, Sampling

TOLERANCE = 1e-5
"""Largest difference of a log-probability [nats] with equal key selection."""
MAX_FLIPS_FRAC = 1e-4
MAX_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached: int


def make_model(seed: int) -> Decoder:
    """Build nano with weights large enough that its distributions and selections are not flat."""
    model = build_model(GlmMoeDsaConfig(initializer_range=0.06), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


async def roll_out(model: Decoder, num_tokens: int, seed: int) -> tuple[list[Sample], EngineHealth]:
    """Sample completions in groups of four with one prompt, a random number of groups at a time.

    Returns:
        the completions, and what the engine said of itself at the end.
    """
    rng = random.Random(seed)
    samples: list[Sample] = []
    config = EngineConfig(cache_tokens=2048, page_tokens=16, max_running=32, max_prefill_tokens=128)

    async def complete(prompt: list[int], session: str, length: int, sample_seed: int) -> None:
        sampling = Sampling(max_new_tokens=length, seed=sample_seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        cached = 0
        async for piece in engine.stream(prompt, sampling, session_id=session):
            tokens.extend(piece.token_ids)
            logprobs.extend(piece.logprobs)
            cached += piece.num_cached_tokens
        samples.append(Sample(tuple(prompt), tuple(tokens), tuple(logprobs), cached))

    async with EmbeddedEngine(model, config, max_context_tokens=MAX_CONTEXT) as engine:
        while sum(len(sample.tokens) for sample in samples) < num_tokens:
            async with asyncio.TaskGroup() as group:
                for _ in range(rng.randint(1, 12)):
                    prompt = [rng.randrange(2048) for _ in range(rng.randint(2, 380))]
                    for member in range(4):
                        length = rng.randint(1, 120)
                        name = f"{len(prompt)}-{rng.random()}-{member}"
                        group.create_task(complete(prompt, name, length, rng.getrandbits(32)))
        health = await engine.health()
    return samples, health


@torch.no_grad()
def trainer_logprobs(model: Decoder, samples: list[Sample], seed: int) -> list[float]:
    """Score the sampled tokens in packs of random composition, prompts shared where they are equal."""
    rng = random.Random(seed)
    order = list(range(len(samples)))
    rng.shuffle(order)
    scored: dict[int, list[float]] = {}
    while order:
        pack = [order.pop() for _ in range(min(len(order), rng.randint(1, 16)))]
        for index, logprobs in zip(
            pack, score_pack(model, [samples[i] for i in pack]), strict=True
        ):
            scored[index] = logprobs
    return [logprob for index in range(len(samples)) for logprob in scored[index]]


def score_pack(model: Decoder, pack: list[Sample]) -> list[list[float]]:
    """Return the log-probabilities of each completion's tokens, prompts computed once where they are equal."""
    spans: list[Span] = []
    ids: list[int] = []
    prompts: dict[tuple[int, ...], tuple[int, int]] = {}
    sources: list[int] = []
    for sample in pack:
        if sample.prompt not in prompts:
            prompts[sample.prompt] = (len(spans), len(ids) + len(sample.prompt) - 1)
            spans.append(Span(len(sample.prompt)))
            ids.extend(sample.prompt)
        parent, last_row = prompts[sample.prompt]
        first = len(ids)
        sources.extend([last_row, *range(first, first + len(sample.tokens) - 1)])
        spans.append(Span(len(sample.tokens), parent))
        ids.extend(sample.tokens)
    hidden = model(torch.tensor(ids), Layout(tuple(spans))).hidden
    targets = torch.tensor([token for sample in pack for token in sample.tokens])
    logprobs, _ = token_logprobs(
        hidden[sources], model.output_weight, targets, compute_dtype=model.compute_dtype
    )
    return [part.tolist() for part in logprobs.split([len(sample.tokens) for sample in pack])]


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=positive, default=10_000, help="sampled tokens to compare")
    parser.add_argument("--seed", type=natural, default=0, help="of weights, prompts and lengths")
    parser.add_argument("--quick", action="store_true", help="500 tokens: does it run at all?")
    options = parser.parse_args()
    num_tokens = 500 if options.quick else options.tokens

    model = make_model(options.seed)
    samples, health = asyncio.run(roll_out(model, num_tokens, options.seed))
    behaviour = torch.tensor([p for sample in samples for p in sample.logprobs])
    policy = torch.tensor(trainer_logprobs(model, samples, options.seed))
    difference = (policy - behaviour).abs()
    flips = int((difference > TOLERANCE).sum())
    agreeing = float(difference[difference <= TOLERANCE].max())
    beyond = sum(len(s.tokens) for s in samples if len(s.prompt) > model.config.index_topk)
    cached = sum(sample.num_cached for sample in samples)

    print(
        f"native kernels: {'yes' if native() else 'no'}; {len(samples)} completions, "
        f"{len(behaviour)} tokens, {beyond} behind prompts longer than index_topk, "
        f"{cached} prompt tokens from the prefix cache, {health.num_preemptions} preemptions, "
        f"mean log-probability {float(behaviour.mean()):.2f}"
    )
    table = Table()
    table.row(
        "largest |log-probability difference| where selections agree [nats]",
        f"{agreeing:.1e}",
        bar=f"<= {TOLERANCE:.0e}",
        holds=agreeing <= TOLERANCE,
    )
    table.row(
        "tokens whose selection flips",
        f"{flips} of {len(behaviour)}",
        bar=f"<= 1 in {round(1 / MAX_FLIPS_FRAC)}",
        holds=flips <= MAX_FLIPS_FRAC * len(behaviour),
    )
    table.row(
        "tokens with bitwise equal log-probability",
        f"{int((difference == 0).sum())} of {len(behaviour)}",
    )
    table.close()


if __name__ == "__main__":
    main()
