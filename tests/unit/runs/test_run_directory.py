import json
import os
import subprocess
import sys

import pytest

from longarc.errors import ConfigError, ContractError
from longarc.runs.directory import RunDirectory, find_runs, format_changes, recipe_changes

RECIPE = {
    "name": "quick",
    "seed": 0,
    "model": {"hidden_size": 128},
    "stages": {
        "pretrain": {"num_steps": 10, "checkpoint_every_steps": 5},
        "sft": {"num_steps": 4, "checkpoint_every_steps": 2},
    },
}


def changed(**stage_changes):
    return RECIPE | {"stages": RECIPE["stages"] | {"sft": RECIPE["stages"]["sft"] | stage_changes}}


def create(path, recipe=RECIPE):
    return RunDirectory.create(path, recipe=recipe, seeds={"run": 0}, clock=lambda: 5.0)


def resume(path, recipe=RECIPE):
    return RunDirectory.resume(path, recipe=recipe, seeds={"run": 0}, clock=lambda: 6.0)


def test_a_run_records_its_recipe_and_what_it_was_made_with(tmp_path):
    with create(tmp_path / "run") as run:
        assert run.recipe() == RECIPE
        [start] = run.environments()
    assert start["started_at_s"] == 5.0
    assert start["seeds"] == {"run": 0}
    assert start["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "pydantic" in start["packages"]


def test_the_code_is_identified_by_its_commit(tmp_path):
    with create(tmp_path / "run") as run:
        commit = run.environments()[0]["git_commit"]
    assert commit is None or len(commit.removesuffix("+changes")) == 40


def test_a_second_run_in_one_directory_is_refused_with_the_way_on(tmp_path):
    create(tmp_path / "run").close()
    with pytest.raises(ConfigError, match="continue it with --resume"):
        create(tmp_path / "run")


def test_a_directory_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"not empty \(thesis.tex"):
        create(tmp_path)


@pytest.mark.parametrize("leftover", ["lock", "environment.json", ".recipe.json.tmp"])
def test_a_start_that_was_killed_at_once_can_be_started_again(tmp_path, leftover):
    create(tmp_path / "run").close()
    (tmp_path / "run" / "recipe.json").rename(tmp_path / "run" / ".recipe.json.tmp")
    if leftover != ".recipe.json.tmp":
        (tmp_path / "run" / ".recipe.json.tmp").unlink()
    if leftover == "lock":
        (tmp_path / "run" / "environment.json").unlink()
    with create(tmp_path / "run") as run:
        assert run.recipe() == RECIPE


def test_a_directory_that_is_no_run_cannot_be_resumed_or_looked_at(tmp_path):
    with pytest.raises(ConfigError, match="no run to resume"):
        resume(tmp_path)
    with pytest.raises(ConfigError, match="is not a run directory"):
        RunDirectory.look(tmp_path)


def test_two_processes_never_run_one_directory(tmp_path):
    with create(tmp_path / "run"):
        code = (
            "import sys; from pathlib import Path; from longarc.errors import ConfigError\n"
            "from longarc.runs.directory import RunDirectory\n"
            "try: RunDirectory.resume(Path(sys.argv[1]), recipe={}, seeds={})\n"
            "except ConfigError as error: print(error)\n"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "in use by process" in other.stdout
        with pytest.raises(ConfigError, match="in use by process"):
            resume(tmp_path / "run")
    resume(tmp_path / "run").close()


def test_a_run_can_be_looked_at_while_it_goes_but_not_written(tmp_path):
    with create(tmp_path / "run"):
        look = RunDirectory.look(tmp_path / "run")
        assert look.recipe() == RECIPE
        assert look.running_in() in (os.getpid(), None)
        with pytest.raises(ContractError, match="for reading only"):
            look.open_ledger()
    assert look.running_in() is None


def test_a_failed_start_releases_the_lock(tmp_path):
    create(tmp_path / "run").close()
    with pytest.raises(ConfigError):
        create(tmp_path / "run")
    resume(tmp_path / "run").close()


def test_resuming_adds_a_start(tmp_path):
    create(tmp_path / "run").close()
    with resume(tmp_path / "run") as run:
        assert [start["started_at_s"] for start in run.environments()] == [5.0, 6.0]


def test_resuming_with_another_recipe_is_refused_with_the_difference(tmp_path):
    create(tmp_path / "run").close()
    with pytest.raises(ConfigError, match=r"stages.sft.num_steps: 4 -> 5"):
        resume(tmp_path / "run", changed(num_steps=5))
    assert RunDirectory.look(tmp_path / "run").recipe() == RECIPE


def test_a_harmless_change_is_taken_over_and_recorded(tmp_path):
    create(tmp_path / "run").close()
    new = changed(checkpoint_every_steps=1)
    with resume(tmp_path / "run", new) as run:
        assert run.recipe() == new
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text())
    assert event["event"] == "recipe_changed"
    assert event["changes"] == {"stages.sft.checkpoint_every_steps": [2, 1]}


def test_tuples_and_lists_are_the_same_recipe(tmp_path):
    create(tmp_path / "run", RECIPE | {"betas": [0.9, 0.95]}).close()
    resume(tmp_path / "run", RECIPE | {"betas": (0.9, 0.95)}).close()


def test_another_order_of_stages_is_another_recipe():
    swapped = RECIPE | {"stages": dict(reversed(RECIPE["stages"].items()))}
    assert list(recipe_changes(RECIPE, swapped)) == ["stages (order)"]


def test_added_and_removed_keys_are_differences():
    changes = recipe_changes({"a": {"b": 1}, "c": {}}, {"a": {"d": 1}})
    assert changes == {"a.b": (1, "(not set)"), "c": ({}, "(not set)"), "a.d": ("(not set)", 1)}
    assert format_changes({"a.b": (1, 2)}) == "  a.b: 1 -> 2"


def test_a_damaged_recipe_is_a_contract_error(tmp_path):
    create(tmp_path / "run").close()
    (tmp_path / "run" / "recipe.json").write_text("{")
    with pytest.raises(ContractError, match=r"recipe.json is damaged"):
        resume(tmp_path / "run")


def test_stages_are_listed_in_the_recipes_order(tmp_path):
    with create(tmp_path / "run") as run:
        for name in ("sft", "pretrain", "extra"):
            run.stage(name).writer(keep_last=1)
        assert run.stages() == ["pretrain", "sft", "extra"]


def test_the_ledger_of_a_run_is_written_and_read(tmp_path):
    with create(tmp_path / "run") as run:
        with run.open_ledger() as ledger:
            assert ledger.audit().ok
        with run.read_ledger() as reader:
            assert reader.stages() == []


def test_events_are_lines_with_a_time(tmp_path):
    with create(tmp_path / "run") as run:
        run.event("stage_started", stage="sft")
        run.event("stage_ended", stage="sft", step=4)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "time_s": 5.0,
        "event": "stage_ended",
        "stage": "sft",
        "step": 4,
    }


def test_runs_are_found_at_and_below_a_directory(tmp_path):
    create(tmp_path / "b").close()
    create(tmp_path / "a").close()
    (tmp_path / "other").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["a", "b"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(tmp_path / "nowhere") == []
