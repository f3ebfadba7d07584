"""Runs that an older or newer version made: their recipes are read, compared and continued."""

import json
from pathlib import Path

import pytest

from longarc.cli._recipe import recipe_of_run
from longarc.cli.main import main
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.config.recorded import read_recorded
from longarc.errors import ConfigError
from longarc.pipeline.local import open_workspace
from longarc.pipeline.progress import ProgressLine
from longarc.runs.directory import RunDirectory

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke.toml"
NEWER = (("engine", "routing"), ("engine", "kind"), ("model", "rope_scaling"))
"""Options that a run may be older than."""


def written_today(*overrides):
    return load_settings(Recipe, SMOKE, overrides=overrides).model_dump(mode="json")


def written_before():
    """Return the smoke recipe as a version wrote it that lacked some options and had others."""
    tree = written_today()
    for section, key in NEWER:
        tree[section].pop(key, None)
    tree["engine"]["num_slots"] = 160
    for stage in tree["stages"].values():
        stage["abandoned"] = {"deeply": True}
        if "rollout" in stage:
            del stage["rollout"]["top_p"]
    return tree


@pytest.fixture
def old_run(tmp_path):
    path = tmp_path / "old"
    RunDirectory.create(path, recipe=written_before(), seeds={}).close()
    return path


def test_newer_options_have_their_defaults_and_older_ones_are_named():
    tree = written_before()
    recorded = read_recorded(tree, source="recipe.json")
    assert recorded.recipe.model_dump(mode="json") == written_today()
    assert recorded.removed["engine.num_slots"] == 160
    assert {f"stages.{name}.abandoned" for name in tree["stages"]} < set(recorded.removed)
    assert "engine.num_slots = 160" in recorded.note()
    assert tree == written_before()


def test_what_this_version_wrote_loses_nothing():
    assert read_recorded(written_today(), source="recipe.json").note() == ""


def test_a_value_that_this_version_refuses_is_an_error_that_names_it():
    tree = written_before()
    tree["engine"]["max_running"] = -1
    with pytest.raises(ConfigError, match=r"engine.max_running = -1"):
        read_recorded(tree, source="recipe.json")


def test_an_older_run_goes_on_with_its_recipe_and_its_file_stays(old_run):
    before = (old_run / "recipe.json").read_bytes()
    recipe = recipe_of_run(old_run)
    with open_workspace(recipe, old_run, resume=True, progress=ProgressLine()) as workspace:
        assert workspace.recipe == recipe
    assert (old_run / "recipe.json").read_bytes() == before


def test_a_newer_option_that_is_set_is_a_change_from_its_default(old_run):
    recipe = load_settings(Recipe, SMOKE, overrides=["stages.agentic_rl.rollout.top_p=0.5"])
    with (
        pytest.raises(ConfigError, match=r"rollout.top_p: 1.0 -> 0.5") as refused,
        open_workspace(recipe, old_run, resume=True, progress=ProgressLine()),
    ):
        pass
    assert "not set" not in str(refused.value)
    assert "num_slots" not in str(refused.value)


def test_options_that_are_gone_are_warned_of(old_run, caplog):
    recipe_of_run(old_run)
    assert "engine.num_slots = 160" in caplog.text


def test_runs_of_two_versions_differ_in_what_both_could_be_told(old_run, tmp_path, capsys):
    new_run = tmp_path / "new"
    RunDirectory.create(new_run, recipe=written_today("seed=7"), seeds={}).close()
    seed = json.loads((old_run / "recipe.json").read_text())["seed"]
    assert main(["runs", "diff", str(old_run), str(new_run)]) == 0
    assert capsys.readouterr().out.startswith(f"recipe:\n  seed: {seed} -> 7\nenvironment")
