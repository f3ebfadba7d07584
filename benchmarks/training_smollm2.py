"""One training step of a model of the shape of SmolLM2-135M, in fp32 and with products in bf16.

The batch is 64 sequences of 77 tokens that share nothing, 64 tokens of each trained on with the clipped loss of
PPO. A step is everything that the trainer does between two policies: packing, forward, loss with log-probabilities
and entropies over 49,152 ids, backward, clipping, AdamW on fp32 weights, and the digest of the new weights. The
first step of each dtype is not measured; the best of the others counts. No peer.

Usage: python benchmarks/training_smollm2.py [--processes 2] [--threads 1] [--repeats 3] [--quick]
"""

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import SMOLLM2, Table, positive, processor_s
from sampled import sampled_group, sampled_trajectory

from longarc.algos.losses import ppo_clip
from longarc.config.model import ComputeDtype, LlamaConfig
from longarc.config.training import OptimizerConfig
from longarc.models.build import build_model
from longarc.records.batch import Batch
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.policy import PolicySettings, PolicyTrainer

BARS_S: dict[ComputeDtype, float] = {"float32": 34.0, "bfloat16": 20.0}
NUM_GROUPS = 8
GROUP_SIZE = 8
NUM_PROMPT = 13
NUM_TRAINED = 64
MICRO_BATCH_TOKENS = 1232
"""Sixteen of the sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps of one dtype."""

    steps_s: list[float]
    cpu_s: list[float]
    """Processor time of all processes, step by step."""
    peak_gib: float
    """Most memory of each process, added up; the weights that they share count once more for each."""

    @property
    def best_s(self) -> float:
        """The fastest step."""
        return min(self.steps_s)


def make_batch(step: int, vocab_size: int) -> Batch:
    """Draw sequences that share nothing; what the weights of ``step`` would have sampled does not matter."""
    generator = torch.Generator().manual_seed(step)
    shape = (NUM_GROUPS, GROUP_SIZE, NUM_PROMPT + NUM_TRAINED)
    ids = torch.randint(0, vocab_size, shape, generator=generator).tolist()
    groups = [
        sampled_group(
            [
                sampled_trajectory(
                    f"{step}/{task}/{member}",
                    row[:NUM_PROMPT],
                    row[NUM_PROMPT:],
                    [-10.0] * NUM_TRAINED,
                    step,
                )
                for member, row in enumerate(rows)
            ]
        )
        for task, rows in enumerate(ids)
    ]
    return Batch(stage="bench", step=step, groups=tuple(groups), trainer_version=step)


def measure(config: LlamaConfig, options: argparse.Namespace) -> Measured:
    """Take steps with one dtype, from the same weights on the same batches."""
    steps_s, cpu_s = [], []
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    with (
        tempfile.TemporaryDirectory(prefix="longarc-training-") as scratch,
        contextlib.closing(GradientPool(options.processes)) as pool,
    ):
        trainer = PolicyTrainer(
            build_model(config, seed=0),
            PolicySettings(
                optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.0, use_muon=False),
                num_steps=options.repeats + 1,
                micro_batch_tokens=MICRO_BATCH_TOKENS,
            ),
            loss=ppo_clip,
            publish_directory=scratch,
            gradients=pool.open,
        )
        for step in range(options.repeats + 1):
            batch = make_batch(step, config.vocab_size)
            started_s, cpu_started_s = time.perf_counter(), processor_s()
            trainer.take_step(batch)
            steps_s.append(time.perf_counter() - started_s)
            cpu_s.append(processor_s() - cpu_started_s)
        return Measured(steps_s=steps_s[1:], cpu_s=cpu_s[1:], peak_gib=_peak_gib())


def _peak_gib() -> float:
    """Return the high-water marks of this process and of those that share its gradients."""
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def add_rows(table: Table, dtype: ComputeDtype, measured: Measured) -> None:
    """Show one dtype: its bar, its processor time, which other load changes less, and its memory."""
    what = f"{NUM_GROUPS * GROUP_SIZE} x {NUM_PROMPT + NUM_TRAINED} tokens, {dtype}"
    table.row(
        f"training step, SmolLM2-135M, {what} [s]",
        f"{measured.best_s:.1f}",
        bar=f"ours <= {BARS_S[dtype]:.0f}",
        holds=measured.best_s <= BARS_S[dtype],
    )
    table.row(f"the same, processor time [s], {dtype}", f"{min(measured.cpu_s):.1f}")
    table.row(
        f"the same, most memory of each process, added up [GiB], {dtype}",
        f"{measured.peak_gib:.1f}",
    )


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes", type=positive, default=2, help="processes that share the gradients of a step"
    )
    parser.add_argument(
        "--threads", type=positive, default=1, help="compute threads of the first of them"
    )
    parser.add_argument("--repeats", type=positive, default=3, help="measured steps of each dtype")
    parser.add_argument("--quick", action="store_true", help="two layers: does it run at all?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SMOLLM2
    if options.quick:
        options.repeats = 1
        shape = SMOLLM2.model_copy(update={"num_hidden_layers": 2})
    load = os.getloadavg()[0]
    measured = {
        dtype: measure(shape.model_copy(update={"compute_dtype": dtype}), options)
        for dtype in BARS_S
    }
    print(
        f"{options.processes} process(es), {options.threads} thread(s) in the first, best of "
        f"{options.repeats}, load average before {load:.1f}"
    )
    for dtype, result in measured.items():
        print(f"{dtype}: {', '.join(f'{step_s:.2f}' for step_s in result.steps_s)} s")
    table = Table()
    for dtype, result in measured.items():
        add_rows(table, dtype, result)
    table.close()


if __name__ == "__main__":
    main()
