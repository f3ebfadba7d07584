import json

import pytest

from longarc.cli.main import main

RECIPE = """
name = "tiny"
[tasks.files]
path = "longarc.envs.tasks.files:Files"
[stages.pretrain]
kind = "pretrain"
num_steps = 3
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return str(path)


def test_a_good_recipe_is_called_ok(recipe, capsys):
    assert main(["config", "check", recipe]) == 0
    assert "ok; tiny runs 1 stage(s): pretrain" in capsys.readouterr().out


def test_a_wrong_key_ends_with_2_and_the_nearest_key(recipe, capsys):
    assert main(["config", "check", recipe, "--set", "stages.pretrain.num_step=4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ")
    assert "did you mean stages.pretrain.num_steps?" in error


def test_an_import_path_that_leads_nowhere_is_found_before_anything_runs(recipe, capsys):
    assert main(["config", "check", recipe, "--set", "tasks.files.path=nowhere_at_all:Files"]) == 2
    assert "there is no module 'nowhere_at_all'" in capsys.readouterr().err


def test_show_prints_every_default_and_the_overrides(recipe, capsys):
    assert main(["config", "show", recipe, "--set", "seed=7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["seed"] == 7
    assert shown["model"]["hidden_size"] > 0
    assert shown["stages"]["pretrain"]["num_steps"] == 3


def test_explain_prints_unit_default_and_meaning(capsys):
    assert main(["config", "explain", "agentic_rl"]) == 0
    text = capsys.readouterr().out
    assert "loop.max_lag_steps: integer >= 0" in text
    assert "default: 0  unit: optimizer steps" in text


def test_explain_of_nothing_known_is_a_usage_error(capsys):
    assert main(["config", "explain", "agentic_lr"]) == 2
    assert "agentic_rl" in capsys.readouterr().err


def test_schema_has_both_forms(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Recipe"
    assert main(["config", "schema", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Settings\n")
