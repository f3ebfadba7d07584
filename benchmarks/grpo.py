"""One GRPO step of LongArc beside one of TRL, in one run.

Both start from one Llama-type model of five million parameters in fp32, with the same threads, the same
8 prompts of 32 tokens, 8 samples each of exactly 64 new tokens at temperature 1, the same reward (the
share of even ids) and AdamW. A step is everything between two policies: sampling with log-probabilities,
rewards, advantages, loss, backward, optimizer, and for LongArc also publishing the weights and loading
them into its engine. The two take turns, step by step; the medians count. The first step of each is
not measured.

TRL lives in .venv-peers (make .venv-peers) and in a process of its own; without it the bar does not hold.

Usage: python benchmarks/grpo.py [--threads 1] [--repeats 7] [--quick]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import LLAMA, Table

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
from longarc.trainer.policy import PolicySettings, PolicyTrainer

BAR = 2.5
NUM_PROMPTS = 8
GROUP_SIZE = 8
PROMPT_LENGTH = 32
NUM_NEW = 64
LEARNING_RATE = 1e-5
NUM_RESERVED = 3
"""Ids at the end of the vocabulary that TRL's tokenizer needs for itself and prompts do not use."""
ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-peers/bin/python"
PEER_SCRIPT = ROOT / "benchmarks/peers/trl_grpo.py"


def draw_prompts() -> list[list[int]]:
    """Draw prompts that share nothing."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_PROMPTS, PROMPT_LENGTH)
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

    async def take(self) -> float:
        """Take one step; return how long it took [seconds]."""
        started_s = time.perf_counter()
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
        elapsed_s = time.perf_counter() - started_s
        expected = NUM_PROMPTS * GROUP_SIZE * NUM_NEW
        if report.num_trained_tokens != expected:
            sys.exit(f"LongArc trained {report.num_trained_tokens} tokens instead of {expected}")
        return elapsed_s

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


class Peer:
    """The process that takes TRL's steps."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.versions: dict[str, str] = self._read()["versions"]

    def take(self) -> float:
        """Take one step; return how long it took [seconds]."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        reply = self._read()
        expected = {
            "num_samples": NUM_PROMPTS * GROUP_SIZE,
            "lengths": [NUM_NEW],
            "has_learned": True,
        }
        found = {name: reply[name] for name in expected}
        if found != expected:
            sys.exit(f"TRL's step was not the one to measure: {found} instead of {expected}")
        return float(reply["elapsed_s"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"TRL's process ended with {self._process.wait()}; its words are above")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def open_peer(job: dict[str, Any], scratch: Path) -> Iterator[Peer | None]:
    """Start TRL's process; None where .venv-peers is not made."""
    if not PEER_PYTHON.exists():
        yield None
        return
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    process = subprocess.Popen(
        [str(PEER_PYTHON), str(PEER_SCRIPT), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(job["num_threads"])},
    )
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.communicate()


async def measure(
    scratch: Path, *, threads: int, repeats: int, micro_batch_samples: int
) -> tuple[list[float], list[float], dict[str, str]]:
    """Take steps in turns; return the times of ours and of the peer [seconds], and its versions."""
    model_directory, published = scratch / "model", scratch / "published"
    save_pretrained_dir(build_model(LLAMA, seed=0), model_directory)
    published.mkdir()
    prompts = draw_prompts()
    num_samples = NUM_PROMPTS * GROUP_SIZE
    context = PROMPT_LENGTH + NUM_NEW
    trainer = PolicyTrainer(
        load_pretrained_dir(model_directory),
        PolicySettings(
            optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0, use_muon=False),
            num_steps=repeats + 1,
            micro_batch_tokens=micro_batch_samples * context,
        ),
        loss=ppo_clip,
        publish_directory=str(published),
    )
    engine = EmbeddedEngine(
        load_pretrained_dir(model_directory),
        EngineConfig(num_slots=num_samples, max_running=num_samples, num_threads=threads),
        max_context_tokens=context,
    )
    job = {
        "model": str(model_directory),
        "scratch": str(scratch / "trl"),
        "prompts": prompts,
        "group_size": GROUP_SIZE,
        "num_new": NUM_NEW,
        "lr": LEARNING_RATE,
        "num_threads": threads,
        "num_steps": repeats + 1,
        "micro_batch_samples": micro_batch_samples,
    }
    ours: list[float] = []
    peers: list[float] = []
    async with engine:
        steps = OurSteps(engine, trainer, prompts)
        with open_peer(job, scratch) as peer:
            for _ in range(repeats + 1):
                ours.append(await steps.take())
                if peer is not None:
                    peers.append(peer.take())
            versions = {} if peer is None else peer.versions
    return ours[1:], peers[1:], versions


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each side")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps of each side")
    parser.add_argument(
        "--micro-batch-samples",
        type=int,
        default=64,
        help="samples in one forward and backward of each side; divides 64",
    )
    parser.add_argument("--quick", action="store_true", help="one step each: does it run at all?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats = 1 if options.quick else options.repeats
    with tempfile.TemporaryDirectory(prefix="longarc-grpo-") as scratch:
        ours_s, peer_s, versions = asyncio.run(
            measure(
                Path(scratch),
                threads=options.threads,
                repeats=repeats,
                micro_batch_samples=options.micro_batch_samples,
            )
        )
    num_samples = NUM_PROMPTS * GROUP_SIZE
    peers = ", ".join(f"{name} {version}" for name, version in versions.items()) or "missing"
    print(
        f"fp32, {options.threads} thread(s), median of {repeats} steps, load average "
        f"{os.getloadavg()[0]:.1f}; peer: {peers}"
    )
    if not peer_s:
        print("TRL is not installed here: run `make .venv-peers` and measure again")
    table = Table()
    ours = num_samples / statistics.median(ours_s)
    peer = num_samples / statistics.median(peer_s) if peer_s else None
    table.row(
        f"GRPO step, Llama 5M, {NUM_PROMPTS} x {GROUP_SIZE} x {NUM_NEW} tokens [samples/s], peer TRL",
        f"{ours:.1f}",
        peer="missing" if peer is None else f"{peer:.1f}",
        ratio=None if peer is None else ours / peer,
        bar=f">= {BAR}",
        holds=peer is not None and ours >= BAR * peer,
    )
    table.row("shortest and longest step of ours [s]", f"{min(ours_s):.2f} to {max(ours_s):.2f}")
    if peer_s:
        table.row(
            "shortest and longest step of TRL [s]",
            "-",
            peer=f"{min(peer_s):.2f} to {max(peer_s):.2f}",
        )
    table.close()


if __name__ == "__main__":
    main()
