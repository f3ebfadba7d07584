"""Where there is no room: what is needed and what is free is said, and nothing half-written stays."""

import errno
import os
import re
import subprocess
import sys

import pytest

import chatglm_cases
from gguf_cases import gguf_tensors, settings_of, vocabulary, write_gguf
from longarc.cli.main import main
from longarc.config.recipe import Recipe
from longarc.errors import ResourceError
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.runs.checkpoint import CheckpointWriter
from longarc.runs.disk import free_bytes, size_text, writing
from longarc.runs.files import new_directory, write_atomically
from model_cases import small_llama
from run_cases import small_recipe, write_finished_run
from small_disk import file_size_limit, on_small_disk

NAMES = ("convert", "import", "fetch")
"""Of the commands that write models."""


@pytest.fixture
def command(tmp_path):
    """Return a function that gives the words of a command that writes a model to ``target``."""

    def words(name, target):
        if name == "convert":
            write_finished_run(tmp_path / "run", small_recipe())
            return ["models", "convert", str(tmp_path / "run"), str(target), "--stage", "pretrain"]
        if name == "import":
            source = chatglm_cases.write(tmp_path / "chatglm", chatglm_cases.random_tensors())
            return ["models", "import", str(source), str(target)]
        pytest.importorskip("gguf")
        model = build_model(small_llama(vocab_size=len(vocabulary())), seed=0)
        write_gguf(tmp_path / "m.gguf", settings_of(model), gguf_tensors(model))
        file = ["--gguf", str(tmp_path / "m.gguf")]
        return ["models", "fetch", "smollm2-135m", "--out", str(target), *file]

    return words


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_the_disk_has_no_room_for_is_not_begun(command, name):
    done = on_small_disk(
        f"""
import os
from longarc.cli.main import main
code = main({command(name, "/mnt/models/small")!r})
print(os.listdir("/mnt"))
raise SystemExit(code)
""",
        disk_bytes=60_000,
    )
    if done is None:
        pytest.skip("this machine allows no namespaces, so there is no small disk")
    assert done.returncode == 3, done.stderr
    assert re.search(
        r"^ResourceError: cannot write /mnt/models/small\S*: .*It takes [\d.]+ kB; [\d.]+ (kB|bytes) are free "
        r"there; free some space or give another place$",
        done.stderr,
        re.MULTILINE,
    ), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_refused_half_way_leaves_nothing_behind(command, name, is_there, tmp_path, capsys):
    target = tmp_path / "models" / "small"
    words = command(name, target)
    if is_there:
        target.mkdir(parents=True)
    with file_size_limit(20_000):
        assert main(words) == 3
    shown = capsys.readouterr().err
    assert f"ResourceError: cannot write {target}" in shown
    assert "File too large. It takes" in shown
    assert list(target.iterdir()) == [] if is_there else not target.parent.exists()
    assert main(words) == 0  # the same command, once there is room


@pytest.fixture
def evaluated(tmp_path):
    """Return a finished run whose recipe has an evaluation that was not made yet."""
    eval_stage = {
        "kind": "eval",
        "stages": ["pretrain"],
        "tasks": {"format": {}},
        "rollout": {"max_new_tokens": 8, "max_context_tokens": 480},
    }
    said = small_recipe().model_dump(mode="json")
    said["tasks"] = {"format": {"path": "longarc.envs.tasks.format:Format"}}
    said["stages"]["eval"] = eval_stage
    write_finished_run(tmp_path / "run", Recipe.model_validate(said))
    return tmp_path / "run"


def on_nearly_full_disk(run, words, *, free_bytes):
    """Run a command on a copy of a run, on a disk with so much room; skip where there can be none."""
    done = on_small_disk(
        f"""
import os, shutil
from longarc.cli.main import main
shutil.copytree({str(run)!r}, "/mnt/run")
disk = os.statvfs("/mnt")
with open("/mnt/filler", "wb") as filler:
    filler.write(bytes(max(0, disk.f_bavail * disk.f_frsize - {free_bytes})))
code = main({words!r})
print(sorted(name for name in os.listdir("/mnt/run") if "report" in name or name.startswith(".")))
raise SystemExit(code)
""",
        disk_bytes=8_000_000,
    )
    if done is None:
        pytest.skip("this machine allows no namespaces, so there is no small disk")
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("free_bytes", [0, 20_000, 40_000])
def test_a_report_that_finds_no_room_is_an_error_and_no_half_of_it_stays(evaluated, free_bytes):
    done = on_nearly_full_disk(evaluated, ["report", "/mnt/run"], free_bytes=free_bytes)
    assert done.returncode == 3, done.stderr
    assert re.search(
        r"^ResourceError: .*(too little room|disk I/O error)", done.stderr, re.MULTILINE
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("free_bytes", [0, 20_000, 60_000, 100_000])
def test_an_evaluation_that_finds_no_room_is_an_error_that_says_where(evaluated, free_bytes):
    words = ["eval", "/mnt/run", "--tasks", "2"]
    done = on_nearly_full_disk(evaluated, words, free_bytes=free_bytes)
    assert done.returncode == 3, done.stderr
    assert re.search(r"^ResourceError: .*/mnt/run", done.stderr, re.MULTILINE), done.stderr
    assert "the output or a file" not in done.stderr


def test_what_was_evaluated_is_printed_before_the_report_that_finds_no_room(
    evaluated, monkeypatch, capsys
):
    def fail(_):
        raise ResourceError("cannot write the report")

    monkeypatch.setattr("longarc.pipeline.reporting.write_report", fail)
    assert main(["eval", str(evaluated), "--tasks", "2"]) == 3
    shown = capsys.readouterr()
    assert "cannot write the report" in shown.err
    assert re.search(r"^pretrain +\d+\.\d%$", shown.out, re.MULTILINE), shown.out


def test_a_checkpoint_whose_weights_find_no_room_says_that_nothing_stays(tmp_path):
    model = build_model(small_llama(), seed=0)
    writer = CheckpointWriter(tmp_path / "checkpoints", keep_last=1)
    with (
        file_size_limit(20_000),
        pytest.raises(ResourceError, match=r"too large\. Nothing was half-written"),
    ):
        writer.write(
            lambda directory: save_weights(model, directory / "model.safetensors"),
            kind="policy",
            stage="sft",
            step=1,
            policy_version=1,
            model={},
            tokenizer_sha256=None,
        )
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_beside_it(tmp_path):
    path = tmp_path / "report.html"
    write_atomically(path, b"old")
    with (
        file_size_limit(1000),
        pytest.raises(ResourceError, match=r"It takes 5\.0 kB; .* are free"),
    ):
        write_atomically(path, b"x" * 5000)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_more_than_is_free_is_refused_before_anything_is_written(tmp_path):
    num_bytes = free_bytes(tmp_path) + 10**12
    with (
        pytest.raises(ResourceError, match=f"too little room. It takes {size_text(num_bytes)}; "),
        writing(tmp_path / "a" / "b", num_bytes),
    ):
        raise AssertionError("nothing is begun")


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "free some space or give another place"), (errno.EACCES, "can be written to")],
)
def test_the_fix_is_that_of_what_the_system_says(number, fix, tmp_path):
    with pytest.raises(ResourceError, match=fix), writing(tmp_path):
        raise OSError(number, os.strerror(number))


def test_what_fails_for_another_reason_leaves_nothing_behind_either(tmp_path):
    def fail():
        (tmp_path / "a" / "b" / "sub").mkdir()
        (tmp_path / "a" / "b" / "sub" / "file").touch()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "a" / "b"):
        fail()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_an_output_that_takes_no_more_is_an_error_without_a_traceback():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "longarc.cli.main", "config", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 3
    assert done.stderr == (
        "ResourceError: cannot write the output or a file: No space left on device; free some space or give another place\n"
    )
