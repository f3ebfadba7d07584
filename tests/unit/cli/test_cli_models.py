import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longarc.cli.main import main
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError
from longarc.models.hf_weights import pretrained_config
from longarc.runs.directory import RunDirectory

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "tests" / "unit" / "models" / "configs"


def printed(capsys, *arguments):
    assert main(["models", "info", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def row(text, first_cell):
    return next(line.split() for line in text.splitlines() if line.startswith(first_cell))


def test_info_answers_whether_glm_5_2_has_744_or_753_billion_parameters(capsys):
    out = printed(capsys, CONFIGS / "glm_5_2.json")
    assert out.startswith("family: GLM-5: latent attention, sparse (indexers shared")
    assert row(out, "without MTP")[-2:] == ["743,377,000,704", "40,298,928,384"]
    assert row(out, "MTP, 9.95 B")[-1] == "9,952,920,320"
    assert row(out, "all, 753.33 B")[-1] == "753,329,921,024"
    assert "not counted: 19,456 router biases" in out
    assert out.rstrip().endswith("LongArc builds it: yes")


def test_the_rows_of_the_parts_add_up_to_the_sum(capsys):
    lines = printed(capsys, CONFIGS / "glm_4_5.json").splitlines()
    first, rule = lines.index(next(line for line in lines if line.startswith("part"))) + 1, 0
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    cells = [line.replace(",", "").split()[-5:] for line in lines[first:rule]]
    numbers = [[int(cell) for cell in row] for row in cells]
    assert all(total == size * (main + mtp) for size, main, mtp, total, _ in numbers)
    assert sum(total for *_, total, _ in numbers) == 356_785_884_416
    assert sum(active for *_, active in numbers) == 32_856_305_664


def test_the_cache_is_told_with_and_without_what_drafts_leave_in_it(capsys):
    out = printed(capsys, CONFIGS / "glm_5_2.json")
    latent, keys = 576 * 78, 128 * 21
    assert f"{latent + keys:,}" in row(out, "all, without drafts")
    assert row(out, "states to draft from")[4] == "6,144"
    assert f"{latent + keys + 576 + 128 + 6144:,}" in row(out, "all, with drafts")


def test_the_cache_of_a_model_without_drafts_has_one_sum(capsys):
    out = printed(capsys, CONFIGS / "llama_3_1_8b.json")
    assert row(out, "all  ")[1] == "65,536"
    assert "drafts" not in out


def test_a_context_may_be_chosen(capsys):
    out = printed(capsys, CONFIGS / "glm_5_2.json", "--context", 1000)
    assert "bf16, 1,000 tokens" in out
    assert row(out, "indexer  ")[:2] != row(out, "attention")[:2]
    assert [line for line in out.splitlines() if line.startswith("attention  ")][-1].split()[1] == (
        "1,000"
    )


def test_the_quickstart_can_be_counted_and_built(capsys):
    out = printed(capsys, ROOT / "recipes" / "quickstart.toml")
    assert "in MTP" in out
    assert out.rstrip().endswith("LongArc builds it: yes")


def test_a_directory_with_a_config_is_a_source_too(capsys, tmp_path):
    config = json.loads((CONFIGS / "glm_5.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert printed(capsys, tmp_path).rstrip().endswith("LongArc builds it: yes")


def starting_from(directory, tmp_path):
    """Write a recipe whose model is that of a directory, which differs from the default one."""
    path = tmp_path / "from.toml"
    path.write_text(
        f"""
name = "from"
[initial]
path = "{directory}"
[tokenizer]
path = "{directory}/tokenizer.json"
[tasks.files]
path = "longarc.envs.tasks.files:Files"
[stages.sft]
kind = "sft"
num_steps = 1
tasks = {{ files = {{}} }}
"""
    )
    return path


def test_a_recipe_and_a_run_that_start_from_weights_show_the_model_of_these(capsys, tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "glm_4_5.json").read_text())
    wanted = printed(capsys, tmp_path)
    recipe = starting_from(tmp_path, tmp_path)
    assert printed(capsys, recipe) == wanted
    resolved = load_settings(Recipe, recipe).model_dump(mode="json")
    with RunDirectory.create(tmp_path / "run", recipe=resolved, seeds={"run": 0}):
        assert printed(capsys, tmp_path / "run") == wanted


def test_a_recipe_whose_weights_are_not_there_is_refused_by_its_key(capsys, tmp_path):
    assert main(["models", "info", str(starting_from(tmp_path / "gone", tmp_path))]) == 2
    error = capsys.readouterr().err
    assert "initial.path = " in error
    assert "config.json does not exist" in error


def test_counting_a_config_does_not_load_torch():
    source = str(CONFIGS / "glm_5_2.json")
    code = (
        "import sys; from longarc.cli.main import main; "
        f"main(['models', 'info', {source!r}]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is no recipe"), ("{", "is not JSON"), ("[1]", "holds a JSON list")],
)
def test_what_is_no_model_is_refused(capsys, tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["models", "info", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "yarn"}, "no; rope_scaling in config.json does not describe a yarn scaling: "),
        ({"type": "linear", "factor": 0.5}, "factor: Input should be greater than or equal to 1"),
    ],
)
def test_a_scaling_that_is_wrong_is_told_in_one_line(capsys, tmp_path, rope, message):
    config = json.loads((CONFIGS / "llama_3_1_8b.json").read_text()) | {"rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    last = printed(capsys, tmp_path).rstrip().splitlines()[-1]
    assert last.startswith("LongArc builds it: no; ")
    assert message in last
    assert "pydantic" not in last


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        (["models", "info", "x", "--context"], "1e6", "'1e6' is not a whole number"),
        (["models", "info", "x", "--context"], "", "'' is not a whole number"),
        (["models", "share", "x", "--stage", "dsa", "--keep"], "half", "'half' is not a number"),
        (["serve", "x", "--port"], "http", "'http' is not a whole number"),
        (["serve", "x", "--temperature"], "hot", "'hot' is not a number"),
        (["serve", "x", "--drain-s"], "1m", "'1m' is not a number"),
    ],
)
def test_what_is_no_number_is_told_in_words_and_not_by_the_name_of_a_function(
    option, text, message, capsys
):
    with pytest.raises(SystemExit):
        main([*option, text])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama_3_1_8b", "glm_5_2", "glm_4_5"])
@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantization_config of method 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size=None"),
        ("gptq", "quantization_config in config.json is damaged"),
    ],
)
def test_weights_that_no_run_can_read_are_told_and_refused_before_a_run(
    capsys, tmp_path, name, quantisation, message
):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    content = json.dumps(config | {"quantization_config": quantisation})
    (tmp_path / "config.json").write_text(content)
    last = printed(capsys, tmp_path).rstrip().splitlines()[-1]
    assert last.startswith("LongArc builds it: no; ")
    assert message in last
    with pytest.raises(ConfigError, match=re.escape(message)):
        pretrained_config(tmp_path)
