"""Kills a run at random moments and proves that nothing is lost, doubled or changed.

``kill -9`` hits the whole process group of ``longarc run recipes/smoke.toml`` at random moments over all
stages, 20 times by default; each time the run is resumed with ``--resume`` and killed again, until it is
through. Then the ledger is audited, and the weights after pretrain, midtrain, dsa, sft and mtp are compared bit
for bit with those of a run that was never killed.

Usage: python benchmarks/kill_test.py [--kills 20] [--seed 0] [--recipe recipes/smoke.toml] [--quick]
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import orjson
from common import Table, natural, positive

from longarc.cli.main import main as longarc
from longarc.runs.checkpoint import file_sha256
from longarc.runs.directory import RunDirectory

SUPERVISED = ("pretrain", "midtrain", "dsa", "sft", "mtp")
NUM_PROCESSES = 2


def start(recipe: Path, run_dir: Path) -> "subprocess.Popen[bytes]":
    """Start or resume the run in a process group of its own."""
    command = [
        sys.executable,
        "-m",
        "longarc.cli.main",
        "run",
        str(recipe),
        "--run-dir",
        str(run_dir),
        # The recipe runs on one core; with two, most stages have a second process to lose.
        "--set",
        f"threads={NUM_PROCESSES}",
    ]
    if (run_dir / "recipe.json").exists():
        command.append("--resume")
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process: "subprocess.Popen[bytes]", what: str) -> None:
    """Wait for a run to end well."""
    _, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(f"{what} failed with {process.returncode}:\n{errors.decode(errors='replace')}")


def weights(run_dir: Path) -> dict[str, str]:
    """Digest the final weights of the supervised stages."""
    run = RunDirectory.look(run_dir)
    digests = {}
    for stage in SUPERVISED:
        final = run.stage(stage).final()
        if final is not None:
            digests[stage] = file_sha256(final / "model.safetensors")
    return digests


def stage_of(run_dir: Path) -> str:
    """Say how far a run is: its newest stage directory."""
    stages = [
        p.name for p in sorted((run_dir / "stages").glob("*"), key=lambda p: p.stat().st_mtime)
    ]
    return stages[-1] if stages else "start"


def stage_spans(run_dir: Path) -> dict[str, float]:
    """Return how long each stage of a finished run took, in order [seconds]."""
    events = [orjson.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]
    return {e["stage"]: e["elapsed_s"] for e in events if e["event"] == "stage_ended"}


def has_reached(run_dir: Path, stages: Sequence[str], *, since_s: float) -> bool:
    """Say whether one of ``stages`` has begun in the start that began at ``since_s``."""
    path = run_dir / "events.jsonl"
    if not path.exists():
        return False
    for line in path.read_bytes().splitlines():
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # torn by a kill
        is_start = event["event"] == "stage_started" and event["time_s"] >= since_s
        if is_start and event["stage"] in stages:
            return True
    return False


def killed_run(
    recipe: Path, run_dir: Path, *, spans: dict[str, float], num_kills: int, seed: int
) -> int:
    """Run with kills at random moments of every stage in turn; return how many hit."""
    rng = random.Random(f"kills/{seed}")
    names = list(spans)
    hits = 0
    for number in range(num_kills):
        target = number * len(names) // num_kills
        stage = names[target]
        delay_s = rng.uniform(0.0, 0.9) * spans[stage]
        since_s = time.time()
        process = start(recipe, run_dir)
        # The stage may be over since the last kill; then the one that runs is hit.
        while process.poll() is None and not has_reached(run_dir, names[target:], since_s=since_s):
            time.sleep(0.01)
        try:
            process.wait(timeout=delay_s)
        except subprocess.TimeoutExpired:
            where = stage_of(run_dir)
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            hits += 1
            print(f"  kill {hits:>2} aimed at {stage}, hit {where}", flush=True)
            continue
        finish(process, f"the run that was to be killed in {stage}")
        break
    else:
        finish(start(recipe, run_dir), "the last resume")
    print(f"  the run was through after {hits} kills", flush=True)
    return hits


def main() -> int:
    """Run both and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=positive, default=20, help="random moments")
    parser.add_argument("--seed", type=natural, default=0, help="of the moments")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smoke.toml"))
    parser.add_argument("--quick", action="store_true", help="two kills: does it run at all?")
    arguments = parser.parse_args()
    num_kills = 2 if arguments.quick else arguments.kills
    with tempfile.TemporaryDirectory(prefix="longarc-kill-") as scratch:
        whole = Path(scratch) / "whole"
        started_s = time.monotonic()
        finish(start(arguments.recipe, whole), "the uninterrupted run")
        print(f"uninterrupted: {time.monotonic() - started_s:.0f} s", flush=True)
        spans, expected = stage_spans(whole), weights(whole)
        hits, is_clean = 0, True
        same = dict.fromkeys(expected, True)
        for number in count():  # a run that gets through early is followed by another
            killed = Path(scratch) / f"killed-{number}"
            hits += killed_run(
                arguments.recipe,
                killed,
                spans=spans,
                num_kills=num_kills - hits,
                seed=1000 * arguments.seed + number,
            )
            is_clean &= longarc(["runs", "audit", str(killed)]) == 0
            found = weights(killed)
            same = {stage: ok and found.get(stage) == expected[stage] for stage, ok in same.items()}
            if hits >= num_kills or number == num_kills:
                break
    table = Table()
    table.row("kills", str(hits), bar=f"= {num_kills}", holds=hits == num_kills)
    table.row("audit clean", str(is_clean), bar="= True", holds=is_clean)
    for stage, is_same in same.items():
        table.row(
            f"weights after {stage}, peer the uninterrupted run",
            "identical" if is_same else "different",
            bar="bit-identical",
            holds=is_same,
        )
    return 0 if table.close() else 1


if __name__ == "__main__":
    sys.exit(main())
