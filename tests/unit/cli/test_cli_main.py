import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import longarc
from longarc.cli import main as entry
from longarc.cli._exit import ExitCode, code_of
from longarc.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    LedgerError,
    ResourceError,
    SandboxError,
)


def with_command(monkeypatch, run):
    command = SimpleNamespace(
        SUMMARY="test", __doc__="Test.", configure=lambda parser: None, run=run
    )
    monkeypatch.setattr(entry, "_commands", lambda: [("probe", command)])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ResourceError("x"), 3),
        (SandboxError("x"), 3),
        (LedgerError("x"), 4),
        (CheckpointError("x"), 4),
        (EngineError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_one_line(monkeypatch, capsys, error, code):
    def fail(arguments):
        raise error

    with_command(monkeypatch, fail)
    assert entry.main(["probe"]) == code == code_of(error)
    assert capsys.readouterr().err == f"{type(error).__name__}: x\n"


def test_verbose_shows_where_an_error_comes_from(monkeypatch, capsys):
    def fail(arguments):
        raise ConfigError("x")

    with_command(monkeypatch, fail)
    entry.main(["-v", "probe"])
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_with_130(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    with_command(monkeypatch, interrupted)
    assert entry.main(["probe"]) == ExitCode.INTERRUPTED == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch):
    def bug(arguments):
        raise ZeroDivisionError

    with_command(monkeypatch, bug)
    with pytest.raises(ZeroDivisionError):
        entry.main(["probe"])


def test_every_file_of_the_package_is_a_command_with_a_line_of_help(capsys):
    with pytest.raises(SystemExit) as done:
        entry.main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for name in ("config", "doctor", "runs"):
        assert name in text
    assert "_exit" not in text
    assert "130  interrupted" in text


def test_an_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as done:
        entry.main(["trian"])
    assert done.value.code == 2
    assert "trian" in capsys.readouterr().err


def test_python_dash_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "longarc", "--version"], capture_output=True, text=True, check=True
    )
    assert longarc.__version__ in done.stdout


def test_help_needs_no_torch_and_no_pydantic():
    code = (
        "import sys\nfrom longarc.cli.main import build_parser\nbuild_parser().format_help()\n"
        "print(sorted({'torch', 'pydantic', 'numpy', 'orjson'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_stopped_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "longarc.cli.main", "config", "schema"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
