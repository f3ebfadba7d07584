"""The examples train by the command that their first lines name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longarc.runs.directory import RunDirectory
from longarc.runs.metrics import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def longarc(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, "-m", "longarc.cli.main", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["own_env", "own_loss", "own_agent"])
def test_an_example_trains_on_its_own_part_and_audits_clean(name, tmp_path):
    run_dir = tmp_path / name
    longarc("run", f"examples/{name}.toml", "--run-dir", str(run_dir))

    with RunDirectory.look(run_dir).read_ledger() as ledger:
        assert len(ledger.steps("shout_rl")) == 20
    rewards = [
        record.values["reward/mean"]
        for record in read_metrics(run_dir / "metrics.jsonl")
        if "reward/mean" in record.values  # in the last steps of an asynchronous stage nothing ends
    ]
    # From 0.05 to 0.3 or more; the bound leaves room for another processor's rounding.
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    assert "every promise holds" in longarc("runs", "audit", str(run_dir))
