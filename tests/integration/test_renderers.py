"""Renderers of the ``renderers`` package, in an environment of its own, as chat formats: ``make integration``."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-renderers/bin/python"
NUM_CONVERSATIONS = 100

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not os.access(PYTHON, os.X_OK),
        reason=".venv-renderers is missing: make integration makes it",
    ),
]


def test_no_token_drifts_over_the_renderers_of_glm_and_qwen_and_few_turns_are_begun_anew():
    played = subprocess.run(
        [PYTHON, "tests/integration/renderers_worker.py", str(NUM_CONVERSATIONS)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert played.returncode == 0, played.stderr[-4000:]
    counts = [json.loads(line) for line in played.stdout.splitlines()]
    assert [count["renderer"] for count in counts] == ["glm45", "glm5", "qwen3"]
    for count in counts:
        assert count["trained tokens"] > 100 * NUM_CONVERSATIONS
        # Stray tags and calls that cannot be read are not continued; reasoning across questions is.
        assert 0 < count["rewrites"] < count["requests"] / 20, count
