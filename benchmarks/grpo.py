"""One GRPO step of LongArc beside one of TRL, in one run.

Both start from one Llama-type model of five million parameters in fp32, with the same threads, the same
8 prompts, 8 samples each of exactly 64 new tokens at temperature 1, the same reward (the share of even
ids) and AdamW; once with prompts of 32 tokens, once with prompts of 256, which LongArc computes once
per group. A step is everything between two policies: sampling with log-probabilities, rewards,
advantages, loss, backward, optimizer, and for LongArc also publishing the weights and loading them
into its engine. The two take turns, step by step; the medians count. The first step of each is not
measured. TRL runs at its best: without the gradient checkpointing it turns on by default, and with the
fastest micro-batch.

TRL lives in .venv-peers (`make peers`) and in a process of its own; without it the bars do not hold.

Usage: python benchmarks/grpo.py [--threads 2] [--repeats 7] [--quick]
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import LLAMA, PeerProcess, Table, positive

from longarc.algos.losses import ppo_clip
from longarc.config.engine import EngineConfig
from longarc.config.training import OptimizerConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.records.batch import Batch
from longarc.records.outcome import Outcome
from longarc.records.sampling import Sampling
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.trajectory import Group, Trajectory
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.policy import PolicySettings, PolicyTrainer

BAR = 2.5
NUM_PROMPTS = 8
GROUP_SIZE = 8
PROMPT_LENGTHS = (32, 256)
NUM_NEW = 64
LEARNING_RATE = 1e-5
MICRO_BATCH_TOKENS = 3072
NUM_RESERVED = 3
"""Ids at the end of the vocabulary that TRL's tokenizer needs for itself and prompts do not use."""
ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-peers/bin/python"
PEER_SCRIPT = ROOT / "benchmarks/peers/trl_grpo.py"


@dataclass(frozen=True, slots=True)
class Spent:
    """What one step took [seconds]."""

    elapsed_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps of both sides on one workload."""

    ours: list[Spent]
    peer: list[Spent]
    """Empty where the peer is not installed."""
    versions: dict[str, str]


def draw_prompts(length: int) -> list[list[int]]:
    """Draw prompts that share nothing."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_PROMPTS, length)
    prompts: list[list[int]] = torch.randint(
        0, LLAMA.vocab_size - NUM_RESERVED, shape, generator=generator
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
        started_s, cpu_started_s = time.perf_counter(), _processor_s()
        step = self._trainer.policy_version
        async with asyncio.TaskGroup() as tasks:
            members = [
                [
                    tasks.create_task(self._sample(prompt, f"{step}/{index}/{member}"))
                    for member in range(GROUP_SIZE)
                ]
                for index, prompt in enumerate(self._prompts)
            ]
        groups = [
            Group(
                id=f"{step}/{index}",
                task_id=str(index),
                family="bench",
                trajectories=tuple(task.result() for task in group),
                multiplicities=(1,) * GROUP_SIZE,
            )
            for index, group in enumerate(members)
        ]
        report = await self._trainer.step(
            Batch(stage="bench", step=step, groups=tuple(groups), trainer_version=step)
        )
        source = await self._trainer.publish()
        await self._engine.update_weights(source, policy_version=report.policy_version)
        spent = Spent(time.perf_counter() - started_s, _processor_s() - cpu_started_s)
        expected = NUM_PROMPTS * GROUP_SIZE * NUM_NEW
        if report.num_trained_tokens != expected:
            sys.exit(f"LongArc trained {report.num_trained_tokens} tokens instead of {expected}")
        return spent

    async def _sample(self, prompt: list[int], session_id: str) -> Trajectory:
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        sampling = Sampling(max_new_tokens=NUM_NEW)
        async for piece in self._engine.stream(prompt, sampling, session_id=session_id):
            ids += piece.token_ids
            logprobs += piece.logprobs
            versions += [piece.policy_version] * len(piece.token_ids)
        num_prompt, num_new = len(prompt), len(ids)
        is_sampled = (False,) * num_prompt + (True,) * num_new
        segment = Segment(
            token_ids=(*prompt, *ids),
            is_sampled=is_sampled,
            train_mask=is_sampled,
            behaviour_logprobs=(*[0.0] * num_prompt, *logprobs),
            policy_versions=(*[NOT_SAMPLED] * num_prompt, *versions),
        )
        return Trajectory(
            id=session_id,
            stage="bench",
            group_id=session_id.rpartition("/")[0],
            task_id=session_id.split("/")[1],
            family="bench",
            outcome=Outcome.COMPLETED,
            reward=sum(token % 2 == 0 for token in ids) / num_new,
            reward_parts={},
            segments=(segment,),
            messages=(),
            tools=(),
            num_turns=1,
            difficulty=0.0,
            started_at_s=0.0,
            duration_s=0.0,
        )


def _processor_s() -> float:
    """Return the processor time [s] of this process and of those that share its gradients."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


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
    scratch: Path, prompt_length: int, pool: GradientPool, options: argparse.Namespace
) -> Measured:
    """Take the steps of one workload in turns."""
    model_directory, published = scratch / "model", scratch / "published"
    save_pretrained_dir(build_model(LLAMA, seed=0), model_directory)
    published.mkdir()
    prompts = draw_prompts(prompt_length)
    num_samples = NUM_PROMPTS * GROUP_SIZE
    num_steps = options.repeats + 1
    trainer = PolicyTrainer(
        load_pretrained_dir(model_directory),
        PolicySettings(
            optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0, use_muon=False),
            num_steps=num_steps,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
        ),
        loss=ppo_clip,
        publish_directory=str(published),
        gradients=pool.open,
        num_update_threads=options.threads,
    )
    engine = EmbeddedEngine(
        load_pretrained_dir(model_directory),
        EngineConfig(max_running=num_samples, num_threads=options.threads),
        max_context_tokens=prompt_length + NUM_NEW,
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
        with open_peer(job) as peer:
            for _ in range(num_steps):
                ours.append(await steps.take())
                if peer is not None:
                    peers.append(peer.take())
            versions = {} if peer is None else peer.versions
    return Measured(ours=ours[1:], peer=peers[1:], versions=versions)


def add_rows(table: Table, prompt_length: int, measured: Measured) -> None:
    """Show one workload: the bar on samples/s, and the processor time, which other load changes less."""
    num_samples = NUM_PROMPTS * GROUP_SIZE
    what = f"{NUM_PROMPTS} prompts of {prompt_length}, {GROUP_SIZE} x {NUM_NEW} tokens"
    ours = num_samples / statistics.median(step.elapsed_s for step in measured.ours)
    cpu_s = statistics.median(step.cpu_s for step in measured.ours)
    if not measured.peer:
        table.row(
            f"GRPO step, {what} [samples/s], peer TRL",
            f"{ours:.1f}",
            peer="not installed",
            bar=f"ratio >= {BAR}",
            holds=False,
        )
        return
    peer = num_samples / statistics.median(step.elapsed_s for step in measured.peer)
    peer_cpu_s = statistics.median(step.cpu_s for step in measured.peer)
    table.row(
        f"GRPO step, {what} [samples/s], peer TRL",
        f"{ours:.1f}",
        peer=f"{peer:.1f}",
        ratio=ours / peer,
        bar=f"ratio >= {BAR}",
        holds=ours >= BAR * peer,
    )
    table.row(
        f"GRPO step, {what} [samples per second of processor time], peer TRL",
        f"{num_samples / cpu_s:.1f}",
        peer=f"{num_samples / peer_cpu_s:.1f}",
        ratio=peer_cpu_s / cpu_s,
    )


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, default=2, help="compute threads of each side")
    parser.add_argument("--repeats", type=positive, default=7, help="measured steps of each side")
    parser.add_argument(
        "--prompt-lengths",
        type=positive,
        nargs="+",
        default=PROMPT_LENGTHS,
        help="workloads [tokens]",
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
    parser.add_argument("--quick", action="store_true", help="one step each: does it run at all?")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.prompt_lengths = 1, PROMPT_LENGTHS[:1]
    torch.set_num_threads(1)  # each core has a process, or a thread of the engine
    measured: dict[int, Measured] = {}
    for length in options.prompt_lengths:
        with (
            tempfile.TemporaryDirectory(prefix="longarc-grpo-") as scratch,
            contextlib.closing(GradientPool(options.threads)) as pool,
        ):
            measured[length] = asyncio.run(measure(Path(scratch), length, pool, options))
    versions = next(iter(measured.values())).versions
    print(
        f"Llama of {LLAMA.num_hidden_layers} layers, fp32, {options.threads} thread(s), median of "
        f"{options.repeats} steps, load average {os.getloadavg()[0]:.1f}; TRL: micro-batch "
        f"{options.peer_micro_batch}, checkpointing {'on' if options.peer_checkpointing else 'off'}"
    )
    if versions:
        print("peer: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    else:
        print("TRL is not installed here: run `make peers` and measure again")
    table = Table()
    for length, result in measured.items():
        add_rows(table, length, result)
    table.close()


if __name__ == "__main__":
    main()
