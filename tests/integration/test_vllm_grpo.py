"""A GRPO stage on a real pretrained model that samples through vLLM: ``make integration``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
MODEL = ROOT / "models/smollm2-135m"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason=".venv-vllm is missing: make vllm"),
    pytest.mark.skipif(
        not (MODEL / "config.json").exists(),
        reason=f"{MODEL} is missing: longarc models fetch smollm2-135m",
    ),
]

NUM_STEPS = 3
RECIPE = f"""
name = "vllm-grpo"
seed = 0
threads = 1

[initial]
path = "{MODEL}"

[tokenizer]
path = "{MODEL}/tokenizer.json"
chat_format = "chatml"

[engine]
kind = "vllm"
python = "{PYTHON}"
max_running = 16

[tasks.shout]
path = "examples.own_env:Shout"

[stages.rl]
kind = "reasoning_rl"
loop = {{ num_steps = {NUM_STEPS}, groups_per_step = 2, group_size = 4, dynamic_sampling = false, max_concurrent_rollouts = 16, watchdog_s = 1800.0 }}
rollout = {{ max_new_tokens = 24, max_context_tokens = 160 }}
loss = {{ path = "longarc.algos.losses:icepop", settings = {{ low = 0.5, high = 2.0 }} }}
optimizer = {{ lr = 1e-4, use_muon = false, weight_decay = 0.0 }}
[stages.rl.tasks]
shout = {{}}
"""


def test_a_grpo_stage_trains_through_vllm_with_a_verified_update_after_every_step(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    run = subprocess.run(
        [sys.executable, "-m", "longarc", "run", str(recipe), "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    rows = {line["step"]: line["values"] for line in lines if line["stage"] == "rl"}
    assert list(rows) == list(range(1, NUM_STEPS + 1))
    for row in rows.values():
        # What was sampled with the weights of the step has the trainer's log-probabilities under them.
        assert row["mismatch/mean_abs_log_ratio"] < 1e-3
        assert row["mismatch/probe_gap"] < 1e-3
        assert row["lag/max_steps"] == 0
        assert row["throughput/sampled_tokens_per_s"] > 0
    assert any(row["grad/norm"] > 0 for row in rows.values())
