"""What needs the peers of the benchmarks: ``make integration``."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (ROOT / ".venv-peers/bin/python").exists(),
        reason=".venv-peers is missing: make peers",
    ),
]


def test_trl_loads_our_weights_and_takes_the_step_that_is_measured():
    # Each side ends the script with an error where it did not sample 64 x 64 tokens and learn from them.
    bench = subprocess.run(
        [sys.executable, "benchmarks/grpo.py", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert bench.returncode == 0, bench.stderr
    assert "peer: trl" in bench.stdout
    assert "of 1 hold" in bench.stdout.splitlines()[-1]
