"""``longarc agent run``: a program in a box, a checkpoint behind it, and everything that came of it kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longarc.runs.directory import RunDirectory
from longarc.runs.exchange import read_trajectories
from run_cases import small_recipe, write_finished_run

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
told = {"role": "user", "content": sys.stdin.read()}
first = ask([told])
second = ask([told, first, {"role": "user", "content": "and then?"}])
os.makedirs("made", exist_ok=True)
open("made/file.txt", "w").write(open("given.txt").read() + "and made")
os.symlink("/etc/passwd", "link")
os.remove("given.txt")
"""


def longarc(*arguments, cwd=ROOT):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ROOT / "src"),
    }
    return subprocess.run(
        [sys.executable, "-m", "longarc.cli.main", "agent", "run", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "r"
    write_finished_run(path, small_recipe())
    return path


def command(*argv: str) -> list[str]:
    return ["--harness", "custom", "--set", f"settings.command={json.dumps(argv)}"]


def test_what_a_program_did_is_in_the_ledger_and_in_the_directory(run_dir, tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "given.txt").write_text("given ")
    out = tmp_path / "out"
    done = longarc(
        *command("python3", "-c", PROGRAM),
        *("--run", run_dir, "--workspace", given, "--out", out),
        *("--max-new-tokens", "20", "--", "Write", "the word."),
    )
    assert done.returncode == 0, done.stderr
    assert "2 turns" in done.stdout
    assert "recorded: longarc runs show" in done.stdout

    segments = [json.loads(line) for line in (out / "segments.jsonl").read_text().splitlines()]
    with RunDirectory.look(run_dir).read_ledger() as ledger:
        trajectory = ledger.trajectory("agent/0")
        assert ledger.row("agent/0").disposition == "collected"
        assert ledger.audit().ok
    assert [s["token_ids"] for s in segments] == [list(s.token_ids) for s in trajectory.segments]
    assert trajectory.reward is None
    told = json.loads((out / "trajectory.json").read_text())
    assert (told["outcome"], told["num_turns"]) == (trajectory.outcome.value, 2)
    assert told["messages"][0]["content"] == "Write the word."
    assert len(told["turns"]) == 2
    (read,) = read_trajectories(out / "trajectory.json")
    assert read == trajectory
    files = {
        str(path.relative_to(out / "workspace")): path.read_text()
        for path in (out / "workspace").rglob("*")
        if path.is_file()
    }
    assert files == {"made/file.txt": "given and made"}
    assert not (out / "workspace/link").is_symlink()

    again = longarc(*command("python3", "-c", PROGRAM), "--run", run_dir, "--out", out, "--", "x")
    assert again.returncode != 0
    assert "exists already" in again.stderr


def test_a_program_that_breaks_before_it_asks_fails_the_command(run_dir):
    done = longarc(*command("sh", "-c", "echo broken >&2; exit 3"), "--run", run_dir, "--", "x")
    assert done.returncode == 1
    assert "env_crashed" in done.stdout
    assert "it exited with 3 and said 'broken" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--harness", "codex", "--run", "RUN"],
            "harness 'codex' needs .agents/codex/node_modules",
        ),
        (["--harness", "nothing", "--run", "RUN"], "claude-code"),
        (
            ["--harness", "custom", "--run", "RUN"],
            "missing 1 required keyword-only argument: 'command'",
        ),
        (command("true"), "give --run RUN or --upstream URL"),
        ([*command("true"), "--upstream", "http://127.0.0.1:1"], "--upstream needs --model"),
        (
            [*command("true"), "--run", "RUN", "--engine", "vllm"],
            "--engine has no effect with --run",
        ),
        (
            [*command("true"), "--run", "RUN", "--workspace", "/no/such"],
            "there is no directory /no/such",
        ),
        (
            [*command("true"), "--run", "RUN", "--stage", "rl"],
            "--stage 'rl' is no finished training stage",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line_that_says_what_to_do(
    run_dir, tmp_path, arguments, said
):
    done = longarc(*(str(run_dir) if a == "RUN" else a for a in arguments), "--", "x", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr
