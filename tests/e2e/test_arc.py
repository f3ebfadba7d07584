"""The product as a user meets it: the whole arc by command line, then everything that is done with a run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from safetensors.torch import load_file

from longarc.runs.checkpoint import file_sha256
from longarc.runs.directory import RunDirectory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "smoke.toml"
THREADS = min(2, len(os.sched_getaffinity(0)))
"""The recipe has one; with two, most stages have a second process."""
RUN = ("run", RECIPE, "--set", f"threads={THREADS}")
LAST_LAYER = "model.layers.2.self_attn"
SUPERVISED = ("pretrain", "midtrain", "dsa", "sft", "mtp")


def longarc(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "longarc.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def output_of(*arguments: object, expect: int = 0) -> str:
    process = longarc(*arguments)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == expect, output
    return output


def wait_until(condition, process: "subprocess.Popen[str]") -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("arc") / "run"
    output_of(*RUN, "--run-dir", run_dir)
    return run_dir


def final_weights(run_dir: Path, stage: str) -> str:
    final = RunDirectory.look(run_dir).stage(stage).final()
    assert final is not None
    return file_sha256(final / "model.safetensors")


def test_every_stage_leaves_a_checkpoint_and_the_report_is_written(finished):
    run = RunDirectory.look(finished)
    stages = [name for name in run.recipe()["stages"] if name != "eval"]
    assert all(run.stage(name).final() is not None for name in stages)
    assert (finished / "report.html").stat().st_size > 10_000


def test_the_ledger_keeps_every_promise(finished):
    assert "every promise holds" in output_of("runs", "audit", finished)


def test_the_evaluation_covers_every_family_at_every_asked_checkpoint(finished):
    results = orjson.loads((finished / "stages" / "eval" / "results.json").read_bytes())
    cells = [(cell["stage"], cell["family"]) for cell in results["cells"]]
    assert cells == [(s, f) for s in ("sft", "distill") for f in ("files", "format", "reasoning")]
    assert all(cell["num_excluded"] == 0 for cell in results["cells"])


def test_an_evaluation_in_parts_stands_in_the_order_of_the_recipe(finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    asked = ["eval", run_dir, "--tasks", "2", "--families", "format", "--stages"]
    output_of(*asked, "distill")
    said = output_of(*asked, "reasoning_rl", "sft")
    matrix, _, changes = said.partition("\n\non the same tasks:\n")
    rows = [line.split()[0] for line in matrix.splitlines()[-3:]]
    assert rows == ["sft", "reasoning_rl", "distill"]
    pairs = [line.split(" points")[0].rsplit(" ", 1)[0] for line in changes.splitlines()]
    assert pairs == ["format: sft to reasoning_rl", "format: reasoning_rl to distill"]


def test_the_dsa_stage_takes_an_indexer_away_and_a_search_takes_another(finished):
    run = RunDirectory.look(finished)
    for stage, has_indexer in (("midtrain", True), ("dsa", False), ("distill", False)):
        weights = load_file(run.stage(stage).final() / "model.safetensors")
        assert any(name.startswith(f"{LAST_LAYER}.indexer") for name in weights) == has_indexer
        assert f"{LAST_LAYER}.q_a_proj.weight" in weights
    said = output_of(
        "models", "share", finished, "--stage", "sft", "--keep", "0.3", "--tokens", "512"
    )
    assert [line.split()[-1] for line in said.splitlines()[1:3]] == ["FFS", "FSS"]


@pytest.mark.parametrize(
    "where", ["reasoning_rl:2", "agentic_rl:3", "value_pretrain:3", "sao:4", "distill:1"]
)
def test_a_recorded_step_taken_again_gives_bit_identical_weights(finished, where):
    assert "bit-identical" in output_of(*RUN, "--run-dir", finished, "--replay", where)


def test_a_run_that_was_killed_and_resumed_ends_with_the_same_supervised_weights(
    finished, tmp_path
):
    run_dir = tmp_path / "run"
    for stage, checkpoint in (
        ("pretrain", "step-000004"),
        ("dsa", "step-000002"),
        ("sft", "step-000004"),
        ("mtp", "step-000002"),
        ("reasoning_rl", "step-000002"),
        ("agentic_rl", "step-000002"),
        ("value_pretrain", "step-000002"),
        ("sao", "step-000002"),
    ):
        arguments = [
            *RUN,
            "--run-dir",
            run_dir,
            *(["--resume"] if run_dir.exists() else []),
        ]
        process = longarc(*arguments)
        wanted = run_dir / "stages" / stage / "checkpoints" / checkpoint
        wait_until(wanted.exists, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    output_of(*RUN, "--run-dir", run_dir, "--resume")
    assert "every promise holds" in output_of("runs", "audit", run_dir)
    for stage in SUPERVISED:
        assert final_weights(run_dir, stage) == final_weights(finished, stage), stage


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    run_dir = tmp_path / "run"
    process = longarc(*RUN, "--run-dir", run_dir)
    wait_until((run_dir / "stages" / "pretrain" / "checkpoints" / "step-000004").exists, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "--resume" in output


def test_what_was_trained_can_be_chatted_with_and_the_session_is_in_the_ledger(finished):
    import openai

    process = longarc("serve", finished, "--port", "0", "--api-key", "secret")
    try:
        line = process.stdout.readline()
        assert "base_url=" in line, line
        base_url = line.split("base_url=")[1].split()[0]
        client = openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0)
        tool = {
            "type": "function",
            "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}},
        }
        answer = client.chat.completions.create(
            model="longarc",
            messages=[{"role": "user", "content": "Find the code."}],
            tools=[tool],
            max_tokens=16,
        )
        assert answer.usage.completion_tokens > 0
        client.close()
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    with RunDirectory.look(finished).read_ledger() as ledger:
        (row,) = ledger.rows(stage="serve")
    assert row.disposition == "served"
    assert f"recorded 1 turn: longarc runs show {finished} {row.id}\n" in output
    assert row.num_turns == 1
    shown = output_of("runs", "show", finished, row.id)
    assert str(answer.usage.prompt_tokens) in shown or "assistant" in shown
    assert "every promise holds" in output_of("runs", "audit", finished)
