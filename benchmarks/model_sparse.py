"""Sparse attention (DSA) at length: time and memory beside transformers' implementation and plain MLA, one thread.

A small model in fp32 (4 layers, hidden 64, 4 heads, 4 index heads of 16, 256 keys, 8 experts); hidden states only, no
logits. ``step`` is forward and backward with a frozen indexer, which transformers cannot train. Every side and
length runs in a process of its own; time is processor time, memory what a pass adds at most to the resident memory
of a process that has run a short sequence before. The growth rows compare LongArc with itself.

Usage: python benchmarks/model_sparse.py [--repeats 3] [--quick]
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import PeerProcess, Table, positive

CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,  # as wide as a key, as in GLM-5: SDPA falls back to a slow path otherwise
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 256,
    "max_position_embeddings": 32768,
}
MAX_RATIOS = {"forward": (0.2, 0.08), "step": (0.3, 0.15)}
"""Largest time and memory, as parts of transformers'."""
MAX_TIME_GROWTH, MAX_MEMORY_GROWTH = 12.0, 4.2
WORKER = Path(__file__).parent / "sparse_worker.py"


@dataclass(frozen=True)
class Measured:
    """The best of one side's passes over one length."""

    time_s: float
    peak_mb: float
    indexer_frac: float
    norm: float


def sparse_rows(table: Table, *, num_repeats: int, is_quick: bool) -> None:
    """Measure and print.

    Args:
        table: gets the rows.
        num_repeats: passes of LongArc, of which the best counts; the peers, which take long, have one.
        is_quick: short sequences, of which nothing can be said.
    """
    length = 1024 if is_quick else 8192
    for what, (max_time, max_memory) in MAX_RATIOS.items():
        ours = measure("ours", length, what, repeats=num_repeats)
        theirs = measure("transformers", length, what)
        plain = measure("plain MLA", length, what)
        if abs(ours.norm - theirs.norm) > 1e-4 * theirs.norm:
            sys.exit(f"the hidden states disagree: norms {ours.norm} and {theirs.norm}")
        _compare(table, f"{what}, S={length}, peer transformers", ours, theirs, is_quick=is_quick,
                 max_time=max_time, max_memory=max_memory)  # fmt: skip
        _compare(table, f"{what}, S={length}, peer plain MLA", ours, plain, is_quick=is_quick)
    short, long = length // 2, 2 * length
    for what in MAX_RATIOS:
        before, after = (measure("ours", n, what, repeats=num_repeats) for n in (short, long))
        for figure, growth, most in (
            ("time", after.time_s / before.time_s, MAX_TIME_GROWTH),
            ("memory", after.peak_mb / before.peak_mb, MAX_MEMORY_GROWTH),
        ):
            table.row(
                f"DSA {figure}, {what}, growth from {short} to {long}",
                f"{growth:.2f}x",
                bar="-" if is_quick else f"<= {most}x",
                holds=None if is_quick else growth <= most,
            )
        table.row(
            f"DSA indexer's share of the time, {what}, S={short}; S={long}",
            f"{before.indexer_frac:.0%}; {after.indexer_frac:.0%}",
        )


def _compare(
    table: Table,
    figure: str,
    ours: Measured,
    peer: Measured,
    *,
    is_quick: bool,
    max_time: float | None = None,
    max_memory: float | None = None,
) -> None:
    for unit, own, other, most in (
        ("s", ours.time_s, peer.time_s, max_time),
        ("MB", ours.peak_mb, peer.peak_mb, max_memory),
    ):
        has_bar = most is not None and not is_quick
        table.row(
            f"DSA {figure} [{unit}]",
            f"{own:.3g}",
            peer=f"{other:.3g}",
            ratio=own / other,
            bar=f"<= {most}" if has_bar else "-",
            holds=own <= most * other if has_bar and most is not None else None,
        )


def measure(name: str, num_tokens: int, what: str, *, repeats: int = 1) -> Measured:
    """Run one side over one length in a new process.

    Args:
        name: ``ours``, ``transformers`` or ``plain MLA``.
        num_tokens: S.
        what: ``forward`` or ``step``.
        repeats: passes; the best time and the largest peak count.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job = {
            "scratch": scratch,
            "num_threads": 1,
            "name": name,
            "config": CONFIG,
            "tokens": num_tokens,
            "trains": what == "step",
        }
        with PeerProcess(name, sys.executable, WORKER, job) as worker:
            passes = [worker.ask("pass") for _ in range(repeats)]
    best = min(passes, key=lambda one: one["time_s"])
    return Measured(
        time_s=best["time_s"],
        peak_mb=max(one["peak_bytes"] for one in passes) / 1e6,
        indexer_frac=best["indexer_s"] / best["time_s"],
        norm=best["norm"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, help="passes of LongArc; the best counts"
    )
    parser.add_argument("--quick", action="store_true", help="short sequences, without bars")
    arguments = parser.parse_args()
    table = Table()
    sparse_rows(table, num_repeats=arguments.repeats, is_quick=arguments.quick)
    return 0 if table.close() else 1


if __name__ == "__main__":
    sys.exit(main())
