import json
from collections import namedtuple
from importlib import metadata

import pytest

from longarc.cli import _checks as checks
from longarc.cli import doctor
from longarc.cli.main import main

Usage = namedtuple("Usage", "total used free")


def test_a_machine_with_a_failure_ends_with_1_and_the_fix(monkeypatch, capsys):
    found = [
        checks.Check(name="python", status="ok", detail="3.11", fix=""),
        checks.Check(name="disk", status="fail", detail="0 GiB", fix="free 1 GiB"),
    ]
    monkeypatch.setattr(checks, "every_check", lambda: found)
    assert main(["doctor"]) == 1
    assert (
        capsys.readouterr().out == "ok    python: 3.11\nfail  disk: 0 GiB\n      fix: free 1 GiB\n"
    )
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["status"] == "fail"


def test_every_check_answers_on_this_machine():
    found = checks.every_check()
    assert len({check.name for check in found}) == len(found)
    assert all(check.fix for check in found if check.status != "ok")
    assert all(check.detail for check in found)
    assert [check.status for check in found if check.name == "python"] == ["ok"]
    assert doctor.SUMMARY


@pytest.mark.parametrize(
    ("environment", "cores", "status"),
    [
        ({}, 2, "ok"),
        ({"OMP_NUM_THREADS": "1"}, 2, "ok"),
        ({"OMP_NUM_THREADS": "8"}, 2, "warn"),
        ({}, 1, "warn"),
    ],
)
def test_more_threads_than_cores_are_a_warning(environment, cores, status):
    assert checks.check_threads(environment, num_cores=cores).status == status


@pytest.mark.parametrize(("gib", "status"), [(0.5, "fail"), (3, "warn"), (50, "ok")])
def test_little_disk_is_told_before_a_run_finds_out(monkeypatch, tmp_path, gib, status):
    usage = Usage(0, 0, int(gib * 2**30))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage)
    assert checks.check_disk(tmp_path).status == status


def test_missing_shared_memory_is_a_warning(tmp_path):
    assert checks.check_temporary(tmp_path / "none").status == "warn"


@pytest.mark.parametrize(
    ("version", "status"), [("2.9.1+cpu", "fail"), ("2.10.0", "ok"), (None, "fail")]
)
def test_a_missing_or_old_torch_is_a_failure_with_the_command(monkeypatch, version, status):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(checks.metadata, "version", installed)
    found = checks.check_torch()
    assert found.status == status
    assert ("pip install" in found.fix) == (status == "fail")


def test_no_compiler_is_a_warning(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert checks.check_compiler().status == "warn"
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "does not run" in checks.check_compiler().detail


def test_kernels_are_ok_only_where_they_load(monkeypatch, tmp_path):
    from longarc.models.kernels import build

    library = tmp_path / "kernels.so"
    monkeypatch.setattr(build, "library_path", lambda: library)
    monkeypatch.delenv("LONGARC_NATIVE", raising=False)
    assert "longarc.models.kernels.build" in checks.check_kernels().fix
    library.write_bytes(b"not a library")
    assert "does not load" in checks.check_kernels().detail
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    assert "turned off" in checks.check_kernels().detail
