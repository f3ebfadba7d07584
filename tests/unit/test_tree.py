"""Tests look at the tree that they lie in."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import longarc

ROOT = Path(__file__).parents[2]


def test_processes_that_tests_start_import_the_tree_under_test(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-c", "import longarc; print(longarc.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(longarc.__file__) == ROOT / "src" / "longarc" / "__init__.py"
    assert Path(shown.strip()) == Path(longarc.__file__)


def test_no_safetensors_is_allowed_that_copies_what_it_writes():
    """0.5.3 does; ``longarc.models.hf_files`` promises that writing makes no copy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["optional-dependencies"]["train"])
    allowed = next(r.specifier for r in requirements if r.name == "safetensors")
    assert "0.7.0" not in allowed
    assert "0.8.0" in allowed


def test_no_file_of_the_package_is_longer_than_500_lines():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "src").rglob("*")
        if path.suffix in {".py", ".h", ".cpp"}
    }
    assert {name: length for name, length in lengths.items() if length > 500} == {}
