"""The projection to log-probabilities: memory and time beside the plain one, with GLM-5's vocabulary.

Each way runs in a process of its own, one after the other. The peak is that above hidden states and
weight and their gradients, the time the median of forward and backward.

Usage: python benchmarks/model_projection.py [--threads 2] [--repeats 5] [--quick]
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import PeerProcess, Table, positive

MAX_PEAK_RATIO = 1 / 20
MAX_TIME_RATIO = 1.15
WORKER = Path(__file__).parent / "projection_worker.py"


def projection_rows(table: Table, *, num_threads: int, num_repeats: int, is_quick: bool) -> None:
    """Measure and print.

    Args:
        table: gets four rows.
        num_threads: compute threads of each process.
        num_repeats: steps of each way; one more warms up.
        is_quick: a small vocabulary and few tokens, of which nothing can be said.
    """
    shape = {"vocab": 154_880, "tokens": 4096, "hidden": 512}
    if is_quick:
        shape = {"vocab": 20_000, "tokens": 1024, "hidden": 64}
    figures = "V={vocab}, S={tokens}, hidden {hidden}".format(**shape)
    for with_entropy in (False, True):
        what = "with entropy" if with_entropy else "loss alone"
        measured = _measured(
            {**shape, "with_entropy": with_entropy}, num_threads=num_threads, repeats=num_repeats
        )
        (plain_s, plain_bytes), (native_s, native_bytes), (eager_s, eager_bytes) = measured
        for name, time_s, peak_bytes in (
            ("native", native_s, native_bytes),
            ("eager", eager_s, eager_bytes),
        ):
            has_bar = not is_quick and name == "native"
            peak_ratio, time_ratio = peak_bytes / plain_bytes, time_s / plain_s
            table.row(
                f"projection peak, {name}, {what}, {figures} [MB]",
                f"{peak_bytes / 1e6:,.0f}",
                peer=f"{plain_bytes / 1e6:,.0f}",
                ratio=peak_ratio,
                bar="-" if is_quick else f"<= {MAX_PEAK_RATIO}",
                holds=None if is_quick else peak_ratio <= MAX_PEAK_RATIO,
            )
            table.row(
                f"projection time, {name}, {what}, {figures} [s]",
                f"{time_s:.2f}",
                peer=f"{plain_s:.2f}",
                ratio=time_ratio,
                bar=f"<= {MAX_TIME_RATIO}" if has_bar else "-",
                holds=time_ratio <= MAX_TIME_RATIO if has_bar else None,
            )


def _measured(job: dict[str, Any], *, num_threads: int, repeats: int) -> list[tuple[float, float]]:
    """Return median time [s] and peak [bytes] of the plain, the native and the eager way."""
    answers = {
        name: _answers({**job, "name": name, "num_threads": num_threads}, count=repeats + 1)
        for name in ("plain", "native", "eager")
    }
    losses = [steps[-1]["loss"] for steps in answers.values()]
    if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
        sys.exit(f"the ways disagree about the loss: {losses}")
    return [
        (statistics.median(s["time_s"] for s in steps[1:]), float(steps[-1]["peak_bytes"]))
        for steps in answers.values()
    ]


def _answers(job: dict[str, Any], *, count: int) -> list[dict[str, Any]]:
    """Return what a process says about each of its steps; it is alone, for its memory and threads."""
    # The kernels look at the environment of their process.
    os.environ["LONGARC_NATIVE"] = "0" if job["name"] == "eager" else "1"
    with tempfile.TemporaryDirectory() as scratch:
        job = {**job, "scratch": scratch}
        with PeerProcess(job["name"], sys.executable, WORKER, job) as worker:
            return [worker.ask("step") for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--quick", action="store_true", help="a small shape, without bars")
    arguments = parser.parse_args()
    table = Table()
    projection_rows(
        table,
        num_threads=arguments.threads,
        num_repeats=arguments.repeats,
        is_quick=arguments.quick,
    )
    return 0 if table.close() else 1


if __name__ == "__main__":
    sys.exit(main())
