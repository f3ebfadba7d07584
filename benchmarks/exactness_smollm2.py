"""Engine against trainer on SmolLM2-135M: is every token's log-probability the same, bit by bit?

The embedded engine samples 100,000 tokens with mixed prompt lengths, prompts shared in groups (prefix hits), requests
that come and go, so few pages that sequences are preempted and computed again, and weights that are exchanged
meanwhile. The trainer then scores the same tokens with the weights that drew them, packed at random. Once with products
in float32 and once in bfloat16.

Half of the requests have their cache computed again at an exchange: all of their tokens are compared, each with its own
version. The other half go on with the cache of before, and what they draw then is left out, for it saw keys of both
weights; so did a request of which only the prompt had been computed, in part, when the exchange came.

The model comes from ``make models/smollm2-135m/config.json``.
Usage: python benchmarks/exactness_smollm2.py [--tokens 100000] [--seed 0] [--threads 2] [--model DIR] [--quick]
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import Table, natural, positive
from exactness import Sample, score_pack

from longarc.config.engine import EngineConfig
from longarc.config.model import ComputeDtype
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_pretrained_dir, save_weights
from longarc.models.kernels.native import native
from longarc.records.sampling import EngineHealth, Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

ROOT = Path(__file__).parents[1]
MAX_CONTEXT = 384
CACHE_TOKENS = 1536
WAVES_OF_A_VERSION = 4
DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")


@dataclass(slots=True)
class Rollout:
    """What the engine drew, by the version of the weights."""

    samples: dict[int, list[Sample]] = field(default_factory=dict)
    health: EngineHealth | None = None
    num_behind_exchanges: int = 0
    """Tokens that are compared though their sequence began under other weights."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the trainer can score."""
        return sum(len(s.tokens) for samples in self.samples.values() for s in samples)


def versions_of(directory: Path, dtype: ComputeDtype) -> list[Decoder]:
    """Load the model twice, the second time with every matrix moved a little."""
    models = [load_pretrained_dir(directory, compute_dtype=dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in models[1].parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.02 * parameter.std() * noise)
    return models


async def roll_out(
    models: Sequence[Decoder], num_tokens: int, *, seed: int, threads: int, scratch: Path
) -> Rollout:
    """Sample waves of requests; every few waves the weights change while one of them runs."""
    rng = random.Random(seed)
    found = Rollout()
    sources = []
    for index, model in enumerate(models):
        path = scratch / f"{index}.safetensors"
        save_weights(model, str(path))
        sources.append(WeightSource(path=str(path), sha256=file_sha256(path)))
    config = EngineConfig(
        cache_tokens=CACHE_TOKENS,
        page_tokens=16,
        max_running=32,
        max_prefill_tokens=256,
        num_threads=threads,
    )
    vocab_size = models[0].config.vocab_size
    served = load_like(models[0])
    wave = version = 0

    async def complete(
        engine: EmbeddedEngine, prompt: list[int], session: str, sampling: Sampling
    ) -> None:
        runs: dict[int, tuple[list[int], list[float]]] = {}
        asked, cached = version, 0
        async for piece in engine.stream(prompt, sampling, session_id=session):
            tokens, logprobs = runs.setdefault(piece.policy_version, ([], []))
            tokens.extend(piece.token_ids)
            logprobs.extend(piece.logprobs)
            cached += piece.num_cached_tokens
        before = list(prompt)
        for drawn_by, (tokens, logprobs) in runs.items():
            if drawn_by == asked or sampling.on_update == "recompute":
                sample = Sample(tuple(before), tuple(tokens), tuple(logprobs), cached)
                found.samples.setdefault(drawn_by, []).append(sample)
                found.num_behind_exchanges += len(tokens) if drawn_by != asked else 0
            before += tokens
            cached = 0

    async with EmbeddedEngine(served, config, max_context_tokens=MAX_CONTEXT) as engine:
        while found.num_tokens < num_tokens:
            wave += 1
            # A long wave, of which much is left when the weights have been read.
            exchanges = wave % WAVES_OF_A_VERSION == 0
            async with asyncio.TaskGroup() as group:
                for _ in range(12 if exchanges else rng.randint(1, 12)):
                    prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(2, 250))]
                    for member in range(4):
                        sampling = Sampling(
                            max_new_tokens=rng.randint(1, 120),
                            seed=rng.getrandbits(32),
                            on_update=rng.choice(("continue", "recompute")),
                        )
                        name = f"{wave}-{len(prompt)}-{rng.random()}-{member}"
                        group.create_task(complete(engine, prompt, name, sampling))
                if exchanges:
                    await asyncio.sleep(0.1)
                    version += 1
                    await engine.update_weights(
                        sources[version % len(sources)], policy_version=version
                    )
        found.health = await engine.health()
    return found


def load_like(model: Decoder) -> Decoder:
    """Return a copy that the engine may overwrite."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy


@torch.no_grad()
def num_differing(models: Sequence[Decoder], found: Rollout, *, seed: int) -> int:
    """Score all tokens in packs of random composition; return how many log-probabilities have other bits."""
    rng = random.Random(seed)
    count = 0
    for version, samples in found.samples.items():
        rng.shuffle(samples)
        rest = list(samples)
        while rest:
            pack = [rest.pop() for _ in range(min(len(rest), rng.randint(1, 16)))]
            scored = score_pack(models[version % len(models)], pack)
            for sample, logprobs in zip(pack, scored, strict=True):
                count += sum(
                    ours != theirs for ours, theirs in zip(sample.logprobs, logprobs, strict=True)
                )
    return count


def add_rows(
    table: Table, directory: Path, dtype: ComputeDtype, *, num_tokens: int, seed: int, threads: int
) -> None:
    """Roll out, score and print one dtype."""
    models = versions_of(directory, dtype)
    with TemporaryDirectory(prefix="longarc-exact-") as scratch:
        rollout = roll_out(models, num_tokens, seed=seed, threads=threads, scratch=Path(scratch))
        found = asyncio.run(rollout)
    differing = num_differing(models, found, seed=seed)
    cached = sum(s.num_cached for samples in found.samples.values() for s in samples)
    completions = sum(len(samples) for samples in found.samples.values())
    preempted = found.health.num_preemptions if found.health else 0
    print(
        f"{dtype}: {completions} completions, {cached} prompt tokens from the prefix cache, {preempted} preemptions, "
        f"{len(found.samples)} versions, {found.num_behind_exchanges} tokens behind an exchange"
    )
    table.row(
        f"SmolLM2-135M, {dtype}: tokens whose log-probability differs in any bit",
        f"{differing} of {found.num_tokens}",
        bar="0",
        holds=differing == 0,
    )


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=positive, default=100_000, help="of each dtype")
    parser.add_argument("--seed", type=natural, default=0, help="of prompts, lengths and draws")
    parser.add_argument("--threads", type=positive, default=2, help="compute threads")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models/smollm2-135m", help="SmolLM2-135M's directory"
    )
    parser.add_argument("--quick", action="store_true", help="500 tokens: does it run at all?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"native kernels: {'yes' if native() else 'no'}; {options.threads} thread(s)")
    table = Table()
    is_there = (options.model / "config.json").exists()
    if not is_there:
        print(f"{options.model} is not there: make models/smollm2-135m/config.json")
    for dtype in DTYPES:
        if is_there:
            add_rows(
                table,
                options.model,
                dtype,
                num_tokens=500 if options.quick else options.tokens,
                seed=options.seed,
                threads=options.threads,
            )
        else:
            table.row(f"SmolLM2-135M, {dtype}", "not measured", bar="0", holds=False)
    table.close()


if __name__ == "__main__":
    main()
