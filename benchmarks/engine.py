"""How fast the embedded engine samples and the trainer trains, beside transformers, in one run.

* Llama-type models of five million parameters, 6 layers of 256 and, in the proportions of SmolLM2-135M,
  12 layers of 192: the engine against ``transformers.generate``, same
  weights, same prompts, fp32, batch 64: prompts that share nothing, and the batch of a GRPO step, 8 prompts
  with 8 samples each, which the engine computes once per group. Both sample at temperature 1; the engine
  also computes log-probabilities, streams and schedules.
* ``longarc-nano`` at batch 64 and contexts of about 400: the engine, with and without native kernels.
* ``longarc-nano`` trained on packed documents of 512 tokens with sparse attention, likewise.

transformers runs in processes of its own, with one thread and with as many as LongArc has; the faster counts.
Every figure is the best of some repeats, taken in turns. Usage:
python benchmarks/engine.py [--threads 2] [--repeats 3] [--quick]
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import DEEP_LLAMA, LLAMA, PeerProcess, Table, positive

from longarc.config.engine import EngineConfig
from longarc.config.model import GlmMoeDsaConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import save_pretrained_dir
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling

BATCH = 64
NUM_NEW = 64
LLAMA_BAR = 4.0
NANO_BAR = 20_000
TRAIN_BAR = 12_000
PEER_SCRIPT = Path(__file__).parent / "peers/generate.py"


def make_prompts(
    length: int, *, group_size: int = 1, batch: int = BATCH, vocab_size: int = 2048
) -> list[list[int]]:
    """Draw prompts that share nothing, each repeated for its group."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch // group_size, length)
    prompts: list[list[int]] = torch.randint(0, vocab_size, shape, generator=generator).tolist()
    return [prompt for prompt in prompts for _ in range(group_size)]


async def _sample_all(engine: EmbeddedEngine, prompts: list[list[int]], num_new: int) -> int:
    counts: list[int] = []

    async def complete(index: int, prompt: list[int]) -> None:
        sampling = Sampling(max_new_tokens=num_new)
        async for piece in engine.stream(prompt, sampling, session_id=str(index)):
            counts.append(len(piece.token_ids))

    async with asyncio.TaskGroup() as group:
        for index, prompt in enumerate(prompts):
            group.create_task(complete(index, prompt))
    return sum(counts)


def _config(length: int, threads: int, batch: int) -> EngineConfig:
    """Return settings with pages for all sequences of that length, and no more."""
    pages = -(-length // EngineConfig().page_tokens)
    return EngineConfig(
        cache_tokens=batch * pages * EngineConfig().page_tokens,
        max_running=batch,
        num_threads=threads,
    )


@contextmanager
def open_engine(
    model: Decoder, prompts: list[list[int]], threads: int
) -> Iterator[Callable[[], float]]:
    """Yield what samples from all prompts at once and returns tokens/s, prefill included.

    The engine stays open from turn to turn, as its peers do. Every turn has prompts of its own, which share as much as
    those given, so that none is in the cache.
    """
    length = len(prompts[0]) + NUM_NEW
    engine = EmbeddedEngine(
        model, _config(length, threads, len(prompts)), max_context_tokens=length
    )
    turns = count()

    async def measure() -> float:
        turn = next(turns)
        fresh = [[(token + turn) % model.config.vocab_size for token in p] for p in prompts]
        started = time.perf_counter()
        num_sampled = await _sample_all(engine, fresh, NUM_NEW)
        return num_sampled / (time.perf_counter() - started)

    with asyncio.Runner() as runner:
        runner.run(engine.__aenter__())
        try:
            yield lambda: runner.run(measure())
        finally:
            runner.run(engine.close())


def decode_tokens_per_s(model: Decoder, context: int, num_new: int, threads: int) -> float:
    """Sample behind contexts that are in the cache already: decode steps alone."""

    async def measure() -> float:
        config = _config(context + num_new, threads, BATCH)
        prompts = make_prompts(context)
        async with EmbeddedEngine(model, config, max_context_tokens=context + num_new) as engine:
            await _sample_all(engine, prompts, 1)
            started = time.perf_counter()
            count = await _sample_all(engine, prompts, num_new)
            return count / (time.perf_counter() - started)

    return asyncio.run(measure())


@contextmanager
def open_peers(
    model: Decoder, workloads: dict[str, list[list[int]]], threads: int
) -> Iterator[list[PeerProcess]]:
    """Start processes with the same Llama in transformers: one thread, and as many as LongArc has."""
    probe = make_prompts(16)[0]
    hidden = model(torch.tensor(probe), Layout.documents([16])).hidden
    expected = (hidden[-1] @ model.output_weight.T).detach()
    with TemporaryDirectory(prefix="longarc-engine-") as scratch, ExitStack() as stack:
        save_pretrained_dir(model, Path(scratch) / "model")
        peers = []
        for num_threads in sorted({1, threads}):
            job = {
                "model": str(Path(scratch) / "model"),
                "scratch": scratch,
                "workloads": workloads,
                "num_new": NUM_NEW,
                "probe": probe,
                "num_threads": num_threads,
            }
            peer = PeerProcess("transformers", sys.executable, PEER_SCRIPT, job)
            peers.append(stack.enter_context(peer))
            logits = torch.tensor(peer.ready["logits"])
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        yield peers


def _generated(peer: PeerProcess, workload: str) -> float:
    speed: float = peer.ask(workload)["tokens_per_s"]
    return speed


def train_tokens_per_s(model: Decoder) -> float:
    """One forward and backward pass over eight documents, the indexer frozen."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 2048, (8 * 512,), generator=generator)
    started = time.perf_counter()
    hidden = model(ids, Layout.documents([512] * 8)).hidden
    logprobs, _ = token_logprobs(hidden[:-1], model.output_weight, ids[1:])
    (-logprobs.mean()).backward()
    model.zero_grad()
    return len(ids) / (time.perf_counter() - started)


def best(repeats: int, *measures: Callable[[], float]) -> list[float]:
    """Run the measures in turns and return the best of each."""
    results = [[measure() for measure in measures] for _ in range(repeats)]
    return [max(column) for column in zip(*results, strict=True)]


def eager(measure: Callable[[], float]) -> Callable[[], float]:
    """Measure without the native kernels."""

    def without() -> float:
        before = os.environ.get("LONGARC_NATIVE")
        os.environ["LONGARC_NATIVE"] = "0"
        try:
            return measure()
        finally:
            os.environ.pop("LONGARC_NATIVE")
            if before is not None:
                os.environ["LONGARC_NATIVE"] = before

    return without


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, default=2, help="compute threads of each side")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="turns of each side; the best counts"
    )
    parser.add_argument("--quick", action="store_true", help="one turn each: does it run at all?")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    torch.set_num_threads(options.threads)

    workloads = {
        "64 prompts of 32": make_prompts(32),
        "8 prompts of 256, 8 samples each": make_prompts(256, group_size=8),
    }
    nano = build_model(GlmMoeDsaConfig(), seed=0)
    trained = build_model(GlmMoeDsaConfig(), seed=0)
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_("indexer" not in name)

    def decode() -> float:
        return decode_tokens_per_s(nano, 368, NUM_NEW, options.threads)

    llama_rows = []
    for shape in (LLAMA, DEEP_LLAMA):
        llama = build_model(shape, seed=0)
        size = sum(parameter.numel() for parameter in llama.parameters()) / 1e6
        title = f"Llama {size:.1f}M, {shape.num_hidden_layers} x {shape.hidden_size}"
        with open_peers(llama, workloads, options.threads) as peers:
            for name, prompts in workloads.items():
                with open_engine(llama, prompts, options.threads) as sample:
                    ours, *theirs = best(
                        repeats, sample, *(partial(_generated, peer, name) for peer in peers)
                    )
                llama_rows.append((f"{title}, {name}", ours, max(theirs)))
            versions = peers[0].ready["versions"]
    nano_ours, nano_eager = best(repeats, decode, eager(decode))
    train_ours, train_eager = best(
        repeats,
        lambda: train_tokens_per_s(trained),
        eager(lambda: train_tokens_per_s(trained)),
    )

    load = os.getloadavg()[0]
    print(
        f"native kernels: {'yes' if native() else 'no'}; fp32, {options.threads} thread(s), "
        f"best of {repeats}, load average {load:.1f}"
    )
    print("peer: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    table = Table()
    for name, ours, theirs in llama_rows:
        table.row(
            f"{name}, 64 new tokens [tokens/s], peer transformers.generate",
            f"{ours:.0f}",
            peer=f"{theirs:.0f}",
            ratio=ours / theirs,
            bar=f"ratio >= {LLAMA_BAR}",
            holds=ours >= LLAMA_BAR * theirs,
        )
    table.row(
        "nano, batch 64, decode at contexts 368 to 432 [tokens/s], peer eager",
        f"{nano_ours:.0f}",
        peer=f"{nano_eager:.0f}",
        ratio=nano_ours / nano_eager,
        bar=f"ours >= {NANO_BAR}",
        holds=nano_ours >= NANO_BAR,
    )
    table.row(
        "nano, forward and backward, 8 x 512 tokens [tokens/s], peer eager",
        f"{train_ours:.0f}",
        peer=f"{train_eager:.0f}",
        ratio=train_ours / train_eager,
        bar=f"ours >= {TRAIN_BAR}",
        holds=train_ours >= TRAIN_BAR,
    )
    table.close()


if __name__ == "__main__":
    main()
