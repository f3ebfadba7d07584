"""One GRPO step of LongArc beside one of TRL, in one run.

Both start from one Llama-type model in fp32, with the same threads, the same 8 prompts, 8 samples each of
exactly 64 new tokens at temperature 1, the same reward (the share of even ids) and AdamW. There are two
models: one of five million parameters, once with prompts of 32 tokens and once with prompts of 256, which
LongArc computes once per group; and one of the shape of SmolLM2-135M with prompts of 32, whose steps LongArc
also takes with products in bf16. A step is everything between two policies: sampling with log-probabilities,
rewards, advantages, loss, backward, optimizer, and for LongArc also publishing the weights and loading them
into its engine. The two take turns, step by step; the medians count. The first step of each is not
measured. TRL runs at its best: without the gradient checkpointing it turns on by default, and with the
fastest micro-batch.

TRL lives in .venv-peers (`make peers`) and in a process of its own; without it the bars do not hold.

Usage: python benchmarks/grpo.py [--models small smollm2] [--threads 2] [--repeats 7] [--quick]
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import LLAMA, SMOLLM2, PeerProcess, Table, positive, processor_s
from sampled import sampled_group, sampled_trajectory

from longarc.algos.losses import ppo_clip
from longarc.config.engine import EngineConfig
from longarc.config.model import LlamaConfig
from longarc.config.training import OptimizerConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.records.batch import Batch
from longarc.records.sampling import Sampling
from longarc.records.trajectory import Trajectory
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.policy import PolicySettings, PolicyTrainer

NUM_PROMPTS = 8
GROUP_SIZE = 8
NUM_NEW = 64
LEARNING_RATE = 1e-5
NUM_RESERVED = 3
"""Ids at the end of the vocabulary that TRL's tokenizer needs for itself and prompts do not use."""
ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-peers/bin/python"
PEER_SCRIPT = ROOT / "benchmarks/peers/trl_grpo.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and prompts, and how much faster than TRL a step must be."""

    title: str
    model: LlamaConfig
    prompt_length: int
    """Tokens of each prompt."""
    bar: float
    """Least ratio of samples/s."""
    num_repeats: int
    """Measured steps of each side, where nobody chooses."""
    micro_batch_tokens: int


SMALL = tuple(
    Workload(
        title=f"Llama of {LLAMA.num_hidden_layers} layers",
        model=LLAMA,
        prompt_length=length,
        bar=2.5,
        num_repeats=7,
        micro_batch_tokens=3072,
    )
    for length in (32, 256)
)
LARGE = Workload(
    title="SmolLM2-135M",
    model=SMOLLM2,
    prompt_length=32,
    bar=1.3,
    num_repeats=2,  # a step of TRL takes a minute
    micro_batch_tokens=1536,
)
WORKLOADS = {"small": SMALL, "smollm2": (LARGE,)}


@dataclass(frozen=True, slots=True)
class Spent:
    """What one step took [seconds]."""

    elapsed_s: float
    cpu_s: float
    sampling_s: float = 0.0
    training_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps of both sides on one workload."""

    ours: list[Spent]
    peer: list[Spent]
    """Empty where the peer is not installed."""
    versions: dict[str, str]


def draw_prompts(workload: Workload) -> list[list[int]]:
    """Draw prompts that share nothing."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_PROMPTS, workload.prompt_length)
    prompts: list[list[int]] = torch.randint(
        0, workload.model.vocab_size - NUM_RESERVED, shape, generator=generator
    ).tolist()
    return prompts


class OurSteps:
    """An engine and a trainer that take GRPO steps on the same prompts."""

    def __init__(
        self, engine: EmbeddedEngine, trainer: PolicyTrainer, prompts: list[list[int]]
    ) -> None:
        self._engine, self._trainer, self._prompts = engine, trainer, prompts

    async def take(self) -> Spent:
        """Take one step."""
        started_s, cpu_started_s = time.perf_counter(), processor_s()
        step = self._trainer.policy_version
        async with asyncio.TaskGroup() as tasks:
            members = [
                [
                    tasks.create_task(self._sample(prompt, f"{step}/{index}/{member}"))
                    for member in range(GROUP_SIZE)
                ]
                for index, prompt in enumerate(self._prompts)
            ]
        groups = [sampled_group([task.result() for task in group]) for group in members]
        sampled_s = time.perf_counter()
        report = await self._trainer.step(
            Batch(stage="bench", step=step, groups=tuple(groups), trainer_version=step)
        )
        trained_s = time.perf_counter()
        source = await self._trainer.publish()
        await self._engine.update_weights(source, policy_version=report.policy_version)
        spent = Spent(
            time.perf_counter() - started_s,
            processor_s() - cpu_started_s,
            sampling_s=sampled_s - started_s,
            training_s=trained_s - sampled_s,
        )
        expected = NUM_PROMPTS * GROUP_SIZE * NUM_NEW
        if report.num_trained_tokens != expected:
            sys.exit(f"LongArc trained {report.num_trained_tokens} tokens instead of {expected}")
        return spent

    async def _sample(self, prompt: list[int], session_id: str) -> Trajectory:
        ids: list[int] = []
        logprobs: list[float] = []
        sampling = Sampling(max_new_tokens=NUM_NEW)
        async for piece in self._engine.stream(prompt, sampling, session_id=session_id):
            ids += piece.token_ids
            logprobs += piece.logprobs
        version = self._trainer.policy_version
        return sampled_trajectory(session_id, prompt, ids, logprobs, version)


class Peer:
    """The process that takes TRL's steps."""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process
        self.versions: dict[str, str] = process.ready["versions"]

    def take(self) -> Spent:
        """Take one step."""
        reply = self._process.ask("step")
        expected = {
            "num_samples": NUM_PROMPTS * GROUP_SIZE,
            "lengths": [NUM_NEW],
            "has_learned": True,
        }
        found = {name: reply[name] for name in expected}
        if found != expected:
            sys.exit(f"TRL's step was not the one to measure: {found} instead of {expected}")
        return Spent(reply["elapsed_s"], reply["cpu_s"])


@contextmanager
def open_peer(job: dict[str, Any]) -> Iterator[Peer | None]:
    """Start TRL's process; None where .venv-peers is not made."""
    if not PEER_PYTHON.exists():
        yield None
        return
    with PeerProcess("TRL", PEER_PYTHON, PEER_SCRIPT, job) as process:
        yield Peer(process)


async def measure(
    scratch: Path,
    workload: Workload,
    pool: GradientPool,
    options: argparse.Namespace,
    *,
    has_peer: bool = True,
) -> Measured:
    """Take the steps of one workload in turns."""
    model_directory, published = scratch / "model", scratch / "published"
    save_pretrained_dir(build_model(workload.model, seed=0), model_directory)
    published.mkdir()
    prompts = draw_prompts(workload)
    num_samples = NUM_PROMPTS * GROUP_SIZE
    num_steps = (options.repeats or workload.num_repeats) + 1
    trainer = PolicyTrainer(
        load_pretrained_dir(model_directory),
        PolicySettings(
            optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0, use_muon=False),
            num_steps=num_steps,
            micro_batch_tokens=workload.micro_batch_tokens,
        ),
        loss=ppo_clip,
        publish_directory=str(published),
        gradients=pool.open,
        num_update_threads=options.threads,
    )
    engine = EmbeddedEngine(
        load_pretrained_dir(model_directory),
        EngineConfig(max_running=num_samples, num_threads=options.threads),
        max_context_tokens=workload.prompt_length + NUM_NEW,
    )
    job = {
        "model": str(model_directory),
        "scratch": str(scratch),
        "prompts": prompts,
        "group_size": GROUP_SIZE,
        "num_new": NUM_NEW,
        "lr": LEARNING_RATE,
        "num_threads": options.threads,
        "num_steps": num_steps,
        "micro_batch_samples": options.peer_micro_batch,
        "gradient_checkpointing": options.peer_checkpointing,
    }
    ours: list[Spent] = []
    peers: list[Spent] = []
    async with engine:
        steps = OurSteps(engine, trainer, prompts)
        with open_peer(job) if has_peer else contextlib.nullcontext() as peer:
            for _ in range(num_steps):
                ours.append(await steps.take())
                if peer is not None:
                    peers.append(peer.take())
            versions = {} if peer is None else peer.versions
    return Measured(ours=ours[1:], peer=peers[1:], versions=versions)


def run(workload: Workload, options: argparse.Namespace, *, has_peer: bool = True) -> Measured:
    """Measure one workload with processes of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="longarc-grpo-") as scratch,
        contextlib.closing(GradientPool(options.threads)) as pool,
    ):
        return asyncio.run(measure(Path(scratch), workload, pool, options, has_peer=has_peer))


def add_rows(table: Table, workload: Workload, measured: Measured) -> None:
    """Show one workload: the bar on samples/s, and the processor time, which other load changes less."""
    what = _described(workload)
    ours = _samples_per_s(measured.ours)
    if not measured.peer:
        table.row(
            f"GRPO step, {what} [samples/s], peer TRL",
            f"{ours:.1f}",
            peer="not installed",
            bar=f"ratio >= {workload.bar}",
            holds=False,
        )
        return
    peer = _samples_per_s(measured.peer)
    table.row(
        f"GRPO step, {what} [samples/s], peer TRL",
        f"{ours:.1f}",
        peer=f"{peer:.1f}",
        ratio=ours / peer,
        bar=f"ratio >= {workload.bar}",
        holds=ours >= workload.bar * peer,
    )
    ours, peer = _samples_per_cpu_s(measured.ours), _samples_per_cpu_s(measured.peer)
    table.row(
        f"GRPO step, {what} [samples per second of processor time], peer TRL",
        f"{ours:.1f}",
        peer=f"{peer:.1f}",
        ratio=ours / peer,
    )


def add_bfloat16_row(
    table: Table, workload: Workload, ours: list[Spent], peer: list[Spent]
) -> None:
    """Show the same workload with our products in bf16, beside the peer's steps in fp32; it has no bar."""
    speed = _samples_per_s(ours)
    table.row(
        f"GRPO step, {_described(workload)}, products in bf16 [samples/s], peer TRL in fp32",
        f"{speed:.1f}",
        peer=f"{_samples_per_s(peer):.1f}" if peer else "not installed",
        ratio=speed / _samples_per_s(peer) if peer else None,
    )


def _described(workload: Workload) -> str:
    return (
        f"{workload.title}, {NUM_PROMPTS} prompts of {workload.prompt_length}, "
        f"{GROUP_SIZE} x {NUM_NEW} tokens"
    )


def _samples_per_s(steps: list[Spent]) -> float:
    return NUM_PROMPTS * GROUP_SIZE / statistics.median(step.elapsed_s for step in steps)


def _samples_per_cpu_s(steps: list[Spent]) -> float:
    return NUM_PROMPTS * GROUP_SIZE / statistics.median(step.cpu_s for step in steps)


def print_parts(what: str, steps: list[Spent]) -> None:
    """Say where our time goes."""
    sampling_s, training_s, whole_s = (
        statistics.median(getattr(step, name) for step in steps)
        for name in ("sampling_s", "training_s", "elapsed_s")
    )
    rest_s = whole_s - sampling_s - training_s
    print(
        f"{what}: {whole_s:.2f} s a step, of which sampling {sampling_s:.2f}, training {training_s:.2f}, "
        f"handing over weights {rest_s:.2f}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="which to measure"
    )
    parser.add_argument("--threads", type=positive, default=2, help="compute threads of each side")
    parser.add_argument(
        "--repeats",
        type=positive,
        help="measured steps of each side; 7 with the small model, 2 with SmolLM2-135M",
    )
    parser.add_argument(
        "--peer-micro-batch",
        type=positive,
        default=16,
        help="samples in one forward and backward of TRL; divides 64",
    )
    parser.add_argument(
        "--peer-checkpointing",
        action="store_true",
        help="leave TRL's gradient checkpointing on, as it comes",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one step of the small model: does it run at all?"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table and how many bars hold."""
    options = parse()
    workloads = [workload for name in options.models for workload in WORKLOADS[name]]
    if options.quick:
        options.repeats, workloads = 1, list(SMALL[:1])
    torch.set_num_threads(1)  # each core has a process, or a thread of the engine
    load = os.getloadavg()[0]
    measured = [(workload, run(workload, options)) for workload in workloads]
    rounded: list[Spent] = []
    if LARGE in workloads:
        in_bfloat16 = LARGE.model.model_copy(update={"compute_dtype": "bfloat16"})
        rounded = run(replace(LARGE, model=in_bfloat16), options, has_peer=False).ours
    print(
        f"fp32, {options.threads} thread(s), medians of the steps, load average before {load:.1f}; TRL: "
        f"micro-batch {options.peer_micro_batch}, checkpointing "
        f"{'on' if options.peer_checkpointing else 'off'}"
    )
    versions = measured[0][1].versions
    if versions:
        print("peer: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    else:
        print("TRL is not installed here: run `make peers` and measure again")
    for workload, result in measured:
        print_parts(f"{workload.title}, prompts of {workload.prompt_length}", result.ours)
    if rounded:
        print_parts(f"{LARGE.title}, products in bf16", rounded)
    table = Table()
    for workload, result in measured:
        add_rows(table, workload, result)
        if workload is LARGE:
            add_bfloat16_row(table, workload, rounded, result.peer)
    table.close()


if __name__ == "__main__":
    main()
