"""Places that a user names for what is written: refused by name where nothing can be made, and early."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longarc.cli.main import main
from longarc.errors import ConfigError, ResourceError
from longarc.runs.checkpoint import CheckpointWriter
from longarc.runs.files import UNFINISHED, check_new_directory, make_directory, new_directory


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("text")
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["models", "fetch", "smollm2-135m", "--out", "TARGET"],
        ["models", "convert", "RUN", "TARGET", "--stage", "sft"],
        ["models", "import", "RUN", "TARGET"],
    ],
)
@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_a_command_refuses_a_target_below_a_file(command, below, file, tmp_path, capsys):
    words = {"TARGET": str(file / below), "RUN": str(tmp_path)}
    assert main([words.get(word, word) for word in command]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ConfigError: ")
    assert str(file / below) in shown
    assert file.read_text() == "text"


def test_a_directory_that_is_new_empty_or_nested_is_free(tmp_path):
    check_new_directory(tmp_path)
    check_new_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="not an empty directory"):
        check_new_directory(tmp_path)


def test_a_relative_place_is_looked_at_from_where_the_user_stands(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match="is a file"):
        check_new_directory(Path("README.md/x"))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")
def test_what_the_system_refuses_is_an_error_that_names_the_place():
    with pytest.raises(ResourceError, match="cannot make directory /proc/x"):
        make_directory(Path("/proc/x"))


def test_every_directory_of_a_run_is_made_with_that_error(file):
    with pytest.raises(ResourceError, match="cannot make directory"):
        CheckpointWriter(file / "checkpoints", keep_last=1)


_KILLED = """
import os, signal, sys
from pathlib import Path
from longarc.runs.files import new_directory
with new_directory(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_cleared_by_the_next_one(tmp_path):
    target = tmp_path / "a" / "model"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (target / "half").exists()
    check_new_directory(target)
    with new_directory(target):
        assert not (target / "half").exists()
        (target / "config.json").write_text("{}")
    assert [inside.name for inside in target.iterdir()] == ["config.json"]
    with pytest.raises(ConfigError, match="not an empty directory"), new_directory(target):
        pass


def test_a_directory_that_is_being_written_is_left_to_its_writer(tmp_path):
    with new_directory(tmp_path):
        (tmp_path / "weights").write_text("w")
        with (
            pytest.raises(ConfigError, match="another process is writing"),
            new_directory(tmp_path),
        ):
            pass
        assert (tmp_path / "weights").exists()
    assert not (tmp_path / UNFINISHED).exists()


def test_a_directory_that_was_finished_meanwhile_is_not_cleared(tmp_path, monkeypatch):
    (tmp_path / "weights").write_text("w")
    monkeypatch.setattr("longarc.runs.files.check_new_directory", lambda path: None)
    with pytest.raises(ConfigError, match="not an empty directory"), new_directory(tmp_path):
        pass
    assert [inside.name for inside in tmp_path.iterdir()] == ["weights"]
