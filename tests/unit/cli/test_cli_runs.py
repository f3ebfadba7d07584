import json
import sqlite3
from dataclasses import replace

import pytest

from ledger_cases import make_admission, make_batch, make_group, make_report, make_trajectory
from longarc.cli._trajectory import trajectory_json
from longarc.cli.main import main
from longarc.runs.directory import RunDirectory
from longarc.runs.metrics import open_sinks


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "a", seed=1)


def make_run(path, *, seed):
    recipe = {"name": "tiny", "seed": seed, "stages": {"rl": {"num_steps": 1}, "eval": {}}}
    with (
        RunDirectory.create(path, recipe=recipe, seeds={"run": seed}) as run,
        run.open_ledger() as ledger,
    ):
        admissions = [make_admission(0, member) for member in range(2)]
        ledger.admit(admissions)
        trajectories = [make_trajectory(admission) for admission in admissions]
        for trajectory in trajectories:
            ledger.complete(trajectory)
        batch = make_batch([make_group(trajectories)])
        ledger.commit_step(batch, make_report(batch))
        sink = open_sinks(path, [], run_name="tiny", recipe=recipe)
        sink.write(stage="rl", step=0, values={"loss/policy": 0.5 + seed})
        sink.close()
        writer = run.stage("rl").writer(keep_last=1)
        checkpoint = writer.write(
            lambda directory: (directory / "model.safetensors").write_bytes(b"w"),
            kind="policy",
            stage="rl",
            step=1,
            policy_version=1,
            model={},
            tokenizer_sha256=None,
        )
        run.stage("rl").set_final(checkpoint)
    return path


def test_runs_are_listed_with_how_far_they_are(run, capsys):
    assert main(["runs", "list", str(run.parent)]) == 0
    assert capsys.readouterr().out == f"{run}: tiny, 1 of 2 stages done\n"


def test_a_place_that_is_not_there_is_not_an_empty_one(tmp_path, monkeypatch, capsys):
    assert main(["runs", "list", str(tmp_path / "rnus")]) == 2
    assert f"there is no directory {tmp_path / 'rnus'}" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # where no run was made yet
    assert main(["runs", "list"]) == 0
    assert capsys.readouterr().out == "no runs in runs\n"


def test_only_stages_of_the_recipe_are_counted(run, capsys):
    for extra in ("initial", "eval-64"):
        (run / "stages" / extra).mkdir()
    sink = open_sinks(run, [], run_name="tiny", recipe={})
    sink.write(stage="serve", step=0, values={"throughput/tokens_per_s": 1.0})
    sink.close()
    assert main(["runs", "list", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}: tiny, 1 of 2 stages done\n"
    assert main(["runs", "show", str(run), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [name for name, stage in stages.items() if stage["is_in_recipe"]] == ["rl", "eval"]
    assert {"initial", "eval-64", "serve"} <= stages.keys()


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([("rl", "files", 4), ("rl", "format", 4)], "2 of 2 stages done"),
        ([("rl", "files", 4)], "1 of 2 stages done, in eval"),
        ([("rl", "files", 4), ("rl", "format", 2)], "1 of 2 stages done, in eval"),
    ],
)
def test_an_evaluation_is_done_when_it_has_all_results_that_were_asked_for(
    run, cells, said, capsys
):
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["stages"]["eval"] = {
        "kind": "eval",
        "stages": ["rl"],
        "tasks": {"files": {}, "format": {}},
        "tasks_per_family": 4,
    }
    (run / "recipe.json").write_text(json.dumps(recipe))
    rows = [{"stage": s, "family": f, "num_tasks": n} for s, f, n in cells]
    (run / "stages" / "eval").mkdir()
    (run / "stages" / "eval" / "results.json").write_text(json.dumps({"cells": rows}))
    assert main(["runs", "list", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}: tiny, {said}\n"


def test_a_damaged_run_hides_no_other(run, tmp_path, capsys):
    make_run(tmp_path / "runs" / "b", seed=2)
    (run / "recipe.json").write_text("{")
    assert main(["runs", "list", str(run.parent)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path}/runs/b: tiny, 1 of 2 stages done\n"
    assert "recipe.json is damaged" in shown.err


def test_a_run_in_progress_is_marked(run, capsys):
    with RunDirectory.resume(run, recipe=RunDirectory.look(run).recipe(), seeds={}) as held:
        main(["runs", "list", str(run)])
        is_known = held.running_in() is not None
    assert ("running as process" in capsys.readouterr().out) == is_known


def test_a_directory_without_runs_says_so(tmp_path, capsys):
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"


def test_a_run_is_summarised(run, capsys):
    assert main(["runs", "show", str(run)]) == 0
    text = capsys.readouterr().out
    for part in (
        "tiny, seed 1",
        "rl: done, newest checkpoint step-000001",
        "1 recorded steps",
        "dispositions: trained 2",
        "loss/policy = 1.5",
        "eval: waiting",
    ):
        assert part in text


def test_a_summary_is_json_on_demand(run, capsys):
    main(["runs", "show", str(run), "--json"])
    stage = json.loads(capsys.readouterr().out)["stages"]["rl"]
    assert stage["outcomes"] == {"completed": 2}
    assert stage["metrics"] == {"loss/policy": 1.5}


def test_a_trajectory_is_printed_token_by_token(run, capsys):
    trajectory = make_trajectory(make_admission(0, 1))
    assert main(["runs", "show", str(run), trajectory.id]) == 0
    text = capsys.readouterr().out
    assert "rl/0/1/0: task files/train/0, completed, reward 1" in text
    assert "trained, step 0 of rl x 1" in text
    assert "(calls bash) {'cmd': 'cat a.txt'}" in text
    lines = [line for line in text.splitlines() if line.startswith("   ")]
    assert len(lines) == 12
    segment = trajectory.segments[0]
    assert lines[0].split() == ["0", str(segment.token_ids[0]), "."]
    logprob = f"{segment.behaviour_logprobs[5]:.5f}"
    assert lines[5].split() == ["5", str(segment.token_ids[5]), "T", logprob, "v0"]


def test_a_trajectory_is_json_on_demand(run, capsys):
    main(["runs", "show", str(run), "rl/0/0/0", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["disposition"] == "trained"
    assert shown["uses"] == [{"stage": "rl", "step": 0, "multiplicity": 1}]
    assert len(shown["segments"][0]["behaviour_logprobs"]) == 12


def test_bytes_of_routing_are_base64_in_json():
    trajectory = make_trajectory()
    (segment,) = trajectory.segments
    routing = (b"\x00\xff", *(b"",) * (len(segment.token_ids) - 1))
    routed = replace(trajectory, segments=(replace(segment, routing=routing),))
    shown = json.loads(json.dumps(trajectory_json(routed, None, ())))
    assert shown["segments"][0]["routing"][:2] == ["AP8=", ""]


def test_an_unknown_trajectory_is_a_usage_error_that_names_some(run, capsys):
    assert main(["runs", "show", str(run), "0/1"]) == 2
    assert "there are 'rl/0/1/0'" in capsys.readouterr().err


def test_a_clean_audit_ends_with_0(run, capsys):
    assert main(["runs", "audit", str(run)]) == 0
    assert "2 trajectories, 2 uses in 1 steps: every promise holds" in capsys.readouterr().out


def test_an_audit_that_finds_something_ends_with_1(run, capsys):
    connection = sqlite3.connect(run / "ledger.sqlite")
    with connection:
        connection.execute("DELETE FROM uses WHERE trajectory_id = 'rl/0/0/0'")
    connection.close()
    assert main(["runs", "audit", str(run)]) == 1
    assert "found: trajectory rl/0/0/0 is trained, but no step used it" in capsys.readouterr().out
    assert main(["runs", "audit", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_damaged_ledger_ends_with_4(run, capsys):
    (run / "ledger.sqlite").write_bytes(b"no database, but long enough to be read as one" * 9)
    assert main(["runs", "audit", str(run)]) == 4
    assert capsys.readouterr().err.startswith("LedgerError: ")


def test_a_directory_that_is_no_run_ends_with_2(tmp_path, capsys):
    assert main(["runs", "show", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_two_runs_are_compared_by_recipe_and_result(run, tmp_path, capsys):
    other = make_run(tmp_path / "runs" / "b", seed=2)
    assert main(["runs", "diff", str(run), str(other)]) == 0
    text = capsys.readouterr().out
    assert "recipe:\n  seed: 1 -> 2" in text
    assert "rl.loss/policy: 1.5 -> 2.5" in text


def test_a_run_compared_with_itself_is_equal(run, capsys):
    main(["runs", "diff", str(run), str(run)])
    assert capsys.readouterr().out == "recipe: equal\nenvironment: equal\nlast metrics: equal\n"
