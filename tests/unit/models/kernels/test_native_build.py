"""Building and loading: what happens with and without a compiler, and whether both sides of the C interface agree."""

import ctypes
import re
import stat
import sys

import pytest

from longarc.errors import ContractError, ResourceError
from longarc.models.kernels import build, native, structs


@pytest.fixture
def empty_environment(tmp_path, monkeypatch):
    """A virtual environment without a library, on a machine without a compiler."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "venv").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def make_compiler(directory, script: str) -> None:
    compiler = directory / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)


def test_without_a_compiler_one_line_says_so_and_nothing_fails(empty_environment, capsys):
    assert build.main() == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "no C++ compiler" in said
    assert "everything runs without them" in said


def test_a_failing_compiler_is_reported_with_its_first_error(empty_environment):
    make_compiler(empty_environment, "echo 'native.cpp:1: error: no such thing' >&2; exit 1")
    with pytest.raises(ResourceError, match="error: no such thing"):
        build.build()
    assert list((empty_environment / "venv" / "share" / "longarc" / "kernels").iterdir()) == []


def test_a_compiler_without_openmp_builds_a_library_for_one_thread(empty_environment):
    make_compiler(
        empty_environment,
        'case "$*" in *-fopenmp*) exit 1;; esac\n'
        'while [ "$1" != "-o" ]; do shift; done\necho library > "$2"',
    )
    assert build.build().read_text() == "library\n"


def test_a_library_is_built_once(empty_environment):
    made = build.library_path()
    made.parent.mkdir(parents=True)
    made.write_text("library")
    assert build.build() == made


def test_the_environment_turns_the_kernels_off(monkeypatch):
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    assert native.native() is None
    with pytest.raises(ContractError, match="not loaded"):
        native.required()


def test_python_calls_every_c_function_with_its_own_arguments():
    source = (build.SOURCES / "native.cpp").read_text()
    declared = {}
    for name, arguments in re.findall(r"^void longarc_(\w+)\(([^)]*)\)", source, re.MULTILINE):
        declared[name] = "".join(
            "p" if "*" in argument else "f" if argument.split()[0] == "float" else "i"
            for argument in arguments.split(",")
        )
    assert declared == native._SIGNATURES


@pytest.mark.parametrize(
    "name", ["Rows", "Steps", "FeedForward", "LlamaLayer", "LlamaShape", "MlaLayer", "MlaShape"]
)
def test_structures_have_the_fields_of_their_c_twins(name):
    headers = ("new_rows.h", "llama.h", "mla.h", "steps.h")
    source = "".join((build.SOURCES / file).read_text() for file in headers)
    body = re.search(rf"struct {name} {{(.*?)\n}};", source, re.DOTALL)[1]
    kinds = {"float": ctypes.c_float, "int64_t": ctypes.c_int64, "FeedForward": structs.FeedForward}
    declared = []
    for line in re.sub(r"//.*", "", body).split(";"):
        words = re.sub("const|volatile", "", line).split(maxsplit=1)
        if len(words) == 2:
            kind, names = words
            pointer = "*" in kind or "*" in names
            for field in names.replace("*", "").split(","):
                declared.append((field.strip(), ctypes.c_void_p if pointer else kinds[kind]))
    assert declared == getattr(structs, name)._fields_


def test_kernels_that_are_not_built_are_missed_once_and_with_the_command(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.delenv("LONGARC_NATIVE", raising=False)
    monkeypatch.setattr(native, "library_path_once", lambda: tmp_path / "none.so")
    assert native.native() is None
    assert native.native() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "not built" in record.getMessage()
    assert "python -m longarc.models.kernels.build" in record.getMessage()


def test_kernels_that_were_turned_off_are_not_missed(monkeypatch, caplog):
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    assert native.native() is None
    assert not caplog.records


def test_a_damaged_library_is_an_error_that_names_it_and_the_command(tmp_path, monkeypatch):
    monkeypatch.delenv("LONGARC_NATIVE", raising=False)
    (tmp_path / "half.so").write_bytes(b"\x7fELF")
    monkeypatch.setattr(native, "library_path_once", lambda: tmp_path / "half.so")
    with pytest.raises(ResourceError, match=r"half\.so cannot be loaded: .*kernels\.build"):
        native.native()
