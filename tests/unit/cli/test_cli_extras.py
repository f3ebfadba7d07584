"""The plain installation: a command that needs an extra says which, without a traceback."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from longarc.cli._extras import EXTRAS, lacking
from longarc.cli.main import main

ROOT = Path(__file__).parents[3]
TRAIN = sorted(module for module, extra in EXTRAS.items() if extra == "train")
PLAIN = f"""
import sys
sys.modules.update(dict.fromkeys({TRAIN!r}))
from longarc.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A Python in which those packages are not installed."""


@pytest.mark.parametrize(
    "command",
    [
        "run recipes/smoke.toml --run-dir DIR",
        "serve DIR",
        "serve DIR --engine-only",
        "eval DIR",
        "models fetch smollm2-135m --out DIR",
        "models convert DIR DIR --stage sft",
        "models import DIR DIR",
        "models share DIR --stage dsa",
    ],
)
def test_a_command_that_computes_names_the_extra_it_needs(command, tmp_path):
    words = command.replace("DIR", str(tmp_path / "new")).split()
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.startswith("ResourceError: this needs the package ")
    assert done.stderr.endswith("pip install 'longarc[train]'\n")
    assert not any(tmp_path.iterdir())


def test_every_package_of_the_extra_is_known():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {re.split(r"[<>=;\[]", need)[0].strip().replace("-", "_") for need in extras["train"]}
    assert named == set(TRAIN)
    assert set(EXTRAS.values()) <= set(extras)


def test_a_package_that_no_extra_brings_is_left_to_its_owner():
    assert lacking(ModuleNotFoundError("x", name="somebodys.module")) is None
    assert lacking(ModuleNotFoundError("x")) is None


def test_the_command_itself_lets_a_foreign_error_through(monkeypatch):
    monkeypatch.setattr("longarc.cli.runs.run", lambda arguments: __import__("no_such_package"))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        main(["runs", "list"])
