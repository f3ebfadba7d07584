"""How long does decoding stand still when new weights come, and does any sequence notice?

SmolLM2-135M, fp32, 32 sequences that run all the time, and several weight updates while they do, once for each
thing that ``Sampling.on_update`` can say: sequences continue with their old cache, recompute it, or finish on the old
weights. Reading the file, its digest, copying and packing happen beside decoding; the pause is what is left, the swap
between two steps, as the engine itself reports it.

A second figure is what a sequence sees: the longest time between two of its tokens from the moment an update was asked
for until the step after it, beside the same without an update. On two cores the work in the background
takes one of them now and then, and recomputing takes steps of its own, which this shows and the pause does not.

Versions are exact where each token's log-probability is the one that the version it names computes, and where the
version before or after computes another one. That is checked where no cache outlives its weights: for sequences that
recompute or finish, and for the tokens of the others up to their first update.

Usage: python benchmarks/weight_update.py [--model models/smollm2-135m] [--threads 2] [--updates 4]
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import Table, positive

from longarc.config.engine import EngineConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.errors import LongArcError
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_pretrained_dir, load_weights, save_weights
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling, UpdatePolicy, WeightSource
from longarc.runs.checkpoint import file_sha256

NUM_SEQUENCES = 32
NUM_PROMPT = 32
TOKENS_BETWEEN = 24
"""Sampled by each sequence between two updates, and before the first and after the last [tokens]."""
NUM_CHECKED = 3
"""Sequences of each kind whose log-probabilities are computed again."""
PAUSE_BAR_S = 0.150
EXACT = 1e-3
"""Largest difference of log-probabilities that one version explains [nats]; another one's is far beyond."""


@dataclass
class Watched:
    """One sequence, token by token."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


@dataclass
class Round:
    """What one round of updates was like."""

    sequences: list[Watched]
    max_pause_s: float
    update_s: list[float]
    windows: list[tuple[float, float]]
    """From when an update was asked for until it was in use [seconds]."""
    num_lost: int

    def gaps_s(self, *, is_inside: bool) -> list[float]:
        """Return the times between two tokens that overlap an update, or that do not."""
        found = []
        for sequence in self.sequences:
            for start, end in zip(sequence.times_s, sequence.times_s[1:], strict=False):
                overlaps = any(start <= stop and end >= first for first, stop in self.windows)
                if overlaps == is_inside:
                    found.append(end - start)
        return found


def publish(directory: Path, model_directory: str, count: int) -> list[WeightSource]:
    """Write weights that differ from those of the model, and from one another, in every matrix."""
    sources = []
    for version in range(1, count + 1):
        model = load_pretrained_dir(model_directory)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + 0.01 * noise)
        path = directory / f"{version}.safetensors"
        save_weights(model, path)
        sources.append(WeightSource(path=str(path), sha256=file_sha256(path)))
    return sources


async def update_round(
    model: Decoder, sources: list[WeightSource], policy: UpdatePolicy, threads: int
) -> Round:
    """Decode all sequences and put the weights in use one after the other."""
    num_new = TOKENS_BETWEEN * (len(sources) + 1)
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    prompts = torch.randint(0, vocab, (NUM_SEQUENCES, NUM_PROMPT), generator=generator).tolist()
    sequences = [Watched(prompt) for prompt in prompts]
    length = NUM_PROMPT + num_new
    config = EngineConfig(
        cache_tokens=NUM_SEQUENCES * (length + EngineConfig().page_tokens),
        max_running=NUM_SEQUENCES,
        num_threads=threads,
    )
    progress = asyncio.Event()

    async def watch(index: int) -> bool:
        asked = Sampling(
            max_new_tokens=num_new, seed=index, stream_interval_tokens=1, on_update=policy
        )
        seen = sequences[index]
        try:
            async for piece in engine.stream(seen.prompt, asked, session_id=str(index)):
                seen.ids += piece.token_ids
                seen.logprobs += piece.logprobs
                seen.versions += [piece.policy_version] * len(piece.token_ids)
                seen.times_s += [time.perf_counter()] * len(piece.token_ids)
                progress.set()
        except LongArcError:
            return False
        return len(seen.ids) == num_new

    windows: list[tuple[float, float]] = []
    async with EmbeddedEngine(model, config, max_context_tokens=length) as engine:
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(watch(index)) for index in range(NUM_SEQUENCES)]
            for number, source in enumerate(sources, start=1):
                while min(len(s.ids) for s in sequences) < number * TOKENS_BETWEEN - 12:
                    progress.clear()
                    await progress.wait()
                asked_s = time.perf_counter()
                await engine.update_weights(source, policy_version=number)
                windows.append((asked_s, time.perf_counter()))
        health = await engine.health()
    return Round(
        sequences=sequences,
        max_pause_s=health.max_update_pause_s,
        update_s=[end - start for start, end in windows],
        windows=windows,
        num_lost=sum(not watch.result() for watch in watches),
    )


@torch.inference_mode()
def num_inexact(
    model: Decoder, first: WeightSource, sources: list[WeightSource], done: Round, *, is_pure: bool
) -> int:
    """Count the tokens whose log-probability is not that of the version they name.

    Where another version explains all tokens that do not name it, they all count.

    Args:
        model: any, whose weights are overwritten.
        first: the weights of version 0.
        sources: those of versions 1, 2, ...
        done: what was sampled.
        is_pure: whether no cache outlived its weights; else only tokens up to the first update count.
    """
    checked = done.sequences[:: max(1, NUM_SEQUENCES // NUM_CHECKED)][:NUM_CHECKED]
    wrong = 0
    for version, source in enumerate([first, *sources]):
        load_weights(model, source.path)
        for sequence in checked:
            ids = torch.tensor(sequence.prompt + sequence.ids)
            hidden = model(ids, Layout.documents([len(ids)])).hidden
            computed, _ = token_logprobs(hidden[:-1], model.output_weight, ids[1:])
            gaps = (computed[NUM_PROMPT - 1 :] - torch.tensor(sequence.logprobs)).abs().tolist()
            for gap, own in zip(gaps, sequence.versions, strict=True):
                is_checked = own == version and (is_pure or own == 0)
                wrong += is_checked and gap > EXACT
            others = [g for g, own in zip(gaps, sequence.versions, strict=True) if own != version]
            # One token may agree by chance; all tokens of other versions never do.
            wrong += len(others) if is_pure and others and max(others) <= EXACT else 0
    return wrong


def main() -> int:
    """Print the table; the exit status says whether every bar holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m", help="a Hugging Face directory")
    parser.add_argument("--threads", type=positive, default=2, help="compute threads of the engine")
    parser.add_argument("--updates", type=positive, default=4, help="weight updates of each round")
    parser.add_argument("--quick", action="store_true", help="one update a round: does it run?")
    options = parser.parse_args()
    count = 1 if options.quick else options.updates
    torch.set_num_threads(options.threads)

    table = Table()
    with TemporaryDirectory(prefix="longarc-update-") as scratch:
        sources = publish(Path(scratch), options.model, count)
        path = Path(scratch) / "0.safetensors"
        save_weights(load_pretrained_dir(options.model), path)
        first = WeightSource(path=str(path), sha256=file_sha256(path))
        policies: tuple[UpdatePolicy, ...] = ("continue", "recompute", "finish")
        for policy in policies:
            # Who finishes does so on the first weights; a further update would wait for the end.
            used = sources[:1] if policy == "finish" else sources
            model = load_pretrained_dir(options.model)
            done = asyncio.run(update_round(model, used, policy, options.threads))
            wrong = num_inexact(model, first, used, done, is_pure=policy != "continue")
            inside, outside = done.gaps_s(is_inside=True), done.gaps_s(is_inside=False)
            name = f"{NUM_SEQUENCES} sequences that {policy}, {len(used)} updates"
            table.row(
                f"{name}: longest pause of an update [ms]",
                f"{1000 * done.max_pause_s:.1f}",
                bar=f"<= {1000 * PAUSE_BAR_S:.0f}",
                holds=done.max_pause_s <= PAUSE_BAR_S,
            )
            table.row(
                f"{name}: sequences lost",
                f"{done.num_lost}",
                bar="0",
                holds=done.num_lost == 0,
            )
            table.row(
                f"{name}: tokens of {NUM_CHECKED} sequences whose version is not exact",
                f"{wrong}",
                bar="0",
                holds=wrong == 0,
            )
            table.row(
                f"{name}: from asking to use, median and longest [s]",
                f"{statistics.median(done.update_s):.2f}, {max(done.update_s):.2f}",
            )
            table.row(
                f"{name}: between two tokens of a sequence, median and longest [ms], peer without update",
                f"{1000 * statistics.median(inside):.0f}, {1000 * max(inside):.0f}",
                peer=f"{1000 * statistics.median(outside):.0f}, {1000 * max(outside):.0f}",
                ratio=statistics.median(inside) / statistics.median(outside),
            )
    print(
        f"native kernels: {'yes' if native() else 'no'}; fp32, {options.threads} thread(s), load average "
        f"{os.getloadavg()[0]:.1f}"
    )
    return 0 if table.close() else 1


if __name__ == "__main__":
    sys.exit(main())
