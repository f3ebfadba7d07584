"""How fast the embedded engine samples from SmolLM2-135M, beside transformers and vLLM, in one run.

32 prompt tokens and 64 new ones per sequence, drawn at temperature 1 from the whole vocabulary, with
log-probabilities, prefill included; batches of 1, 8, 32, 64 and 128, products in bfloat16 and in float32.

* ``transformers.generate`` and vLLM's CPU build, eager and compiled, run in processes of their own with the same
  weights, prompts and threads; of vLLM's two the faster counts. vLLM is measured where ``make vllm`` put it.
* Prompts shared in groups of 8, as in a GRPO step.
* What the processor allows, measured in the same run: GEMM [GFLOP/s] by the engine's own product on weights in the
  cache, memory [GB/s] by reading; and the share of each that the engine reaches.
* A small model of the GLM-5 family with sparse attention, beside transformers.

Every figure is the best of some repeats, taken in turns. The model comes from ``make models/smollm2-135m/config.json``.
Usage: python benchmarks/engine_smollm2.py [--threads 2] [--repeats 3] [--model DIR] [--quick]
"""

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import PeerProcess, Table, positive
from engine import NUM_NEW, PEER_SCRIPT, best, make_prompts, open_engine

from longarc.config.model import ComputeDtype, GlmMoeDsaConfig
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.models.kernels.native import native

ROOT = Path(__file__).parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
VLLM_SCRIPT = Path(__file__).parent / "peers/generate_vllm.py"
NUM_PROMPT = 32
BATCHES = (1, 8, 32, 64, 128)
MAX_PEER_BATCH = 64
VLLM_BARS: dict[ComputeDtype, dict[int, float]] = {
    "bfloat16": {1: 1.0, 8: 1.0, 32: 1.4, 64: 1.4},
    "float32": {32: 1.1, 64: 1.1},
}
"""Times vLLM's tokens/s, by batch."""
GROUP_BARS = {32: 720, 64: 850, 128: 1000}
"""[tokens/s] in bfloat16 with prompts in groups of 8, by batch."""
GLM_BAR = 8.0
GLM = GlmMoeDsaConfig(
    hidden_size=256, num_hidden_layers=4, n_routed_experts=8, index_topk=64, intermediate_size=512
)


PARTS = ("bfloat16", "float32", "glm")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the processor can do at most."""

    gflops: dict[ComputeDtype, float]
    memory_gb_s: float


@dataclass(slots=True)
class Measured:
    """Tokens/s of one dtype."""

    ours: dict[int, float] = field(default_factory=dict)
    transformers: dict[int, float] = field(default_factory=dict)
    vllm: dict[int, float] = field(default_factory=dict)
    groups: dict[int, float] = field(default_factory=dict)


def measure_limits(threads: int, repeats: int) -> Limits:
    """Time a product long enough that waking a thread does not show, and the sum of a table that no cache holds."""
    library = native()
    gflops: dict[ComputeDtype, float] = {}
    x, weight, y = torch.randn(960, 576), torch.randn(1536, 576), torch.empty(960, 1536)
    for dtype in ("bfloat16", "float32"):
        if library is None:
            break
        packed = library.packed(weight, compute_dtype=dtype)
        shape = (len(x), *weight.shape)
        call = partial(library.call, "packed_product", *shape, x, packed, dtype == "bfloat16", y)
        seconds = min(_time(lambda: call(threads)) for _ in range(50 * repeats))  # noqa: B023
        gflops[dtype] = 2 * x.numel() * len(weight) / seconds / 1e9
    table = torch.ones(1 << 27)
    seconds = min(_time(table.sum) for _ in range(2 + repeats))
    return Limits(gflops, table.nbytes / seconds / 1e9)


def _time(work: partial[None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def workloads_of(batches: tuple[int, ...], vocab_size: int) -> dict[str, list[list[int]]]:
    """Draw the prompts of each batch."""
    return {
        str(batch): make_prompts(NUM_PROMPT, batch=batch, vocab_size=vocab_size)
        for batch in batches
    }


def measure(
    directory: Path, dtype: ComputeDtype, *, batches: tuple[int, ...], threads: int, repeats: int
) -> tuple[Measured, dict[str, str]]:
    """Run all sides of one dtype in turns; return tokens/s, and versions of the peers."""
    model = load_pretrained_dir(directory, compute_dtype=dtype)
    vocab_size = model.config.vocab_size
    workloads = workloads_of(batches, vocab_size)
    job = {
        "model": str(directory.resolve()),
        "workloads": workloads,
        "num_new": NUM_NEW,
        "probe": workloads[str(batches[0])][0],
        "num_threads": threads,
        "dtype": dtype,
        "max_length": NUM_PROMPT + NUM_NEW,
    }
    found = Measured()
    versions: dict[str, str] = {}
    with ExitStack() as stack:

        def start(name: str, python: str | Path, script: Path, **changes: object) -> PeerProcess:
            scratch = stack.enter_context(TemporaryDirectory(prefix="longarc-smollm2-"))
            peer = PeerProcess(name, python, script, {**job, "scratch": scratch, **changes})
            versions.update(peer.ready["versions"])
            return stack.enter_context(peer)

        peers = [start("transformers", sys.executable, PEER_SCRIPT)]
        if VLLM_PYTHON.exists():
            peers += [
                start("vLLM", VLLM_PYTHON, VLLM_SCRIPT, is_compiled=is_compiled)
                for is_compiled in (False, True)
            ]
        for batch in batches:
            name = str(batch)
            asked = peers if batch <= MAX_PEER_BATCH else []
            with open_engine(model, workloads[name], threads) as sample:
                found.ours[batch], *others = best(
                    repeats, sample, *(partial(_generated, peer, name) for peer in asked)
                )
            if others:
                found.transformers[batch] = others[0]
            if len(others) > 1:
                found.vllm[batch] = max(others[1:])
    for batch in GROUP_BARS:
        prompts = make_prompts(NUM_PROMPT, batch=batch, group_size=8, vocab_size=vocab_size)
        with open_engine(model, prompts, threads) as sample:
            [found.groups[batch]] = best(repeats, sample)
    return found, versions


def _generated(peer: PeerProcess, workload: str) -> float:
    speed: float = peer.ask(workload)["tokens_per_s"]
    return speed


def add_rows(table: Table, dtype: ComputeDtype, found: Measured) -> None:
    """Print one dtype's speeds beside the peers'."""
    for batch in BATCHES:
        ours, vllm = found.ours.get(batch), found.vllm.get(batch)
        bar = VLLM_BARS[dtype].get(batch)
        table.row(
            f"SmolLM2-135M, {dtype}, batch {batch} [tokens/s], peer vLLM",
            _shown(ours),
            peer=_shown(vllm),
            ratio=ours / vllm if ours and vllm else None,
            bar="-" if bar is None else f"ratio >= {bar}",
            holds=None if bar is None else bool(ours and vllm and ours >= bar * vllm),
        )
        theirs = found.transformers.get(batch)
        table.row(
            "the same, peer transformers.generate",
            _shown(ours),
            peer=_shown(theirs),
            ratio=ours / theirs if ours and theirs else None,
        )
    for batch, least in GROUP_BARS.items():
        reached = found.groups.get(batch)
        has_bar = dtype == "bfloat16"
        table.row(
            f"SmolLM2-135M, {dtype}, batch {batch} in groups of 8 [tokens/s]",
            _shown(reached),
            bar=f">= {least}" if has_bar else "-",
            holds=bool(reached and reached >= least) if has_bar else None,
        )


def _shown(speed: float | None) -> str:
    return "not measured" if speed is None else f"{speed:.0f}"


def add_limits(
    table: Table, limits: Limits, found: dict[ComputeDtype, Measured], model: Decoder
) -> None:
    """Print what the processor can do, and what share of it sampling uses."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    body = numbers - model.output_weight.numel()
    # Of each new token: its own pass, the projection, and its share of the prompt, which is not projected.
    products = 2 * (numbers + body * NUM_PROMPT / NUM_NEW) / 1e9
    table.row("memory [GB/s]", f"{limits.memory_gb_s:.1f}")
    for dtype, measured in found.items():
        bytes_read = numbers * (2 if dtype == "bfloat16" else 4) / 1e9
        if gflops := limits.gflops.get(dtype):
            table.row(f"GEMM, {dtype} [GFLOP/s]", f"{gflops:.0f}")
            for batch in (32, 64, 128):
                if speed := measured.ours.get(batch):
                    share = speed * products / gflops
                    table.row(f"{dtype}, batch {batch}: share of GEMM", f"{share:.0%}")
        if speed := measured.ours.get(1):
            share = speed * bytes_read / limits.memory_gb_s
            table.row(f"{dtype}, batch 1: share of memory", f"{share:.0%}")


def add_glm(table: Table, *, threads: int, repeats: int) -> None:
    """Measure and print the GLM-5-type model."""
    model = build_model(GLM, seed=0)
    prompts = make_prompts(128, batch=16)
    with TemporaryDirectory(prefix="longarc-glm-") as scratch:
        save_pretrained_dir(model, Path(scratch) / "model")
        job = {
            "model": str(Path(scratch) / "model"),
            "scratch": scratch,
            "workloads": {"16": prompts},
            "num_new": NUM_NEW,
            "probe": prompts[0],
            "num_threads": threads,
            "attention": "eager",
        }
        with (
            PeerProcess("transformers", sys.executable, PEER_SCRIPT, job) as peer,
            open_engine(model, prompts, threads) as sample,
        ):
            ours, theirs = best(repeats, sample, partial(_generated, peer, "16"))
    table.row(
        "GLM-5-type, 4 x 256, 8 experts, index_topk 64, batch 16 [tokens/s], peer transformers.generate",
        f"{ours:.0f}",
        peer=f"{theirs:.0f}",
        ratio=ours / theirs,
        bar=f"ratio >= {GLM_BAR}",
        holds=ours >= GLM_BAR * theirs,
    )


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, default=2, help="compute threads of each side")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="turns of each side; the best counts"
    )
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models/smollm2-135m", help="SmolLM2-135M's directory"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="parts to measure; the rest has no rows",
    )
    parser.add_argument("--quick", action="store_true", help="one turn each: does it run at all?")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    batches = (1, 32) if options.quick else BATCHES
    torch.set_num_threads(options.threads)

    print(
        f"native kernels: {'yes' if native() else 'no'}; {options.threads} thread(s), best of {repeats}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    table = Table()
    dtypes: tuple[ComputeDtype, ...] = ("bfloat16", "float32")
    found = {dtype: Measured() for dtype in dtypes if dtype in options.only}
    if not (options.model / "config.json").exists():
        print(f"{options.model} is not there: make models/smollm2-135m/config.json")
    elif found:
        versions: dict[str, str] = {}
        for dtype in found:
            found[dtype], versions = measure(
                options.model, dtype, batches=batches, threads=options.threads, repeats=repeats
            )
        print("peers: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
        limits = measure_limits(options.threads, repeats)
        add_limits(table, limits, found, load_pretrained_dir(options.model))
    for dtype, measured in found.items():
        add_rows(table, dtype, measured)
    if "glm" in options.only:
        add_glm(table, threads=options.threads, repeats=repeats)
    table.close()


if __name__ == "__main__":
    main()
