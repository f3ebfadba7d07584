"""Each trap that a box must not fall into."""

import contextlib
import os
import platform
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

import longarc
from longarc.envs.sandbox.seccomp import ABSENT, DENIED
from longarc.records.ports import SandboxSpec


async def bash(box, script, **options):
    return await box.exec(["bash", "-c", script], **options)


async def python(box, code):
    return await box.exec(["python3", "-c", textwrap.dedent(code)])


async def test_no_host_file_can_be_written_or_created(box):
    result = await bash(
        box,
        """
        for place in / /usr /usr/bin /usr/lib /etc /dev /run /var /home /proc/sys /run/box; do
            if touch $place/longarc-was-here 2>/dev/null; then echo "wrote $place"; fi
        done
        for file in /usr/bin/env /etc/passwd /run/box/execd.pyc /proc/sys/kernel/core_pattern \\
            /proc/sys/net/ipv4/ip_forward /proc/sys/kernel/hostname /proc/sysrq-trigger; do
            if (echo x >> $file) 2>/dev/null; then echo "wrote $file"; fi
        done
        """,
    )
    assert result.stdout == b""


async def test_every_mount_is_read_only_but_the_four_writable_places(box):
    rows = [line.split() for line in (await box.read("/proc/self/mountinfo")).decode().split("\n")]
    rows = [row for row in rows if row]
    writable = {row[4] for row in rows if "ro" not in row[5].split(",")}
    devices = {path for path in writable if path.startswith("/dev/")} - {"/dev/shm"}
    masks = {path for path in writable if path.startswith("/proc/")}  # character device null
    assert writable - devices - masks == {"/workspace", "/tmp", "/home/agent", "/dev/shm", "/proc"}
    assert all("nosuid" in row[5] for row in rows)


async def test_host_folders_are_not_there(box):
    here = Path(__file__).resolve()
    result = await bash(box, f"ls -d /root /work /srv /media /sys /boot {here} 2>/dev/null")
    assert result.stdout == b""
    assert (await bash(box, "cat /etc/shadow")).rc != 0


async def test_the_hosts_installed_packages_are_hidden(box):
    result = await bash(
        box, "ls /usr/lib/python3/dist-packages /usr/local/lib/python3*/*-packages 2>/dev/null"
    )
    names = [line for line in result.stdout.decode().split("\n") if line and ":" not in line]
    assert names == []


async def test_a_symlink_out_of_the_box_leads_nowhere_on_the_host(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    secret.chmod(0o644)
    await bash(
        box,
        f"ln -s {secret} s; ln -s / root; ln -s /proc/1/root r; ln -s ../../..{secret} up;"
        "ln -s /etc/shadow shadow",
    )
    for path in ("s", f"root{secret}", f"r{secret}", "up", "shadow", f"../..{secret}"):
        with pytest.raises(OSError):  # noqa: PT011 - missing or forbidden, both are right
            await box.read(path)
    await bash(box, f"ln -s {tmp_path}/made made")
    with contextlib.suppress(OSError):
        await box.write("made", b"x")
    assert not (tmp_path / "made").exists()


async def test_process_one_tells_nothing_about_the_host(box, monkeypatch):
    result = await bash(
        box,
        """
        cat /proc/1/environ /proc/1/mem /proc/1/maps 2>/dev/null; ls /proc/1/fd /proc/1/root/ 2>/dev/null
        tr '\\0' ' ' < /proc/1/cmdline; echo; hostname; ls -d /proc/[0-9]* | wc -l; cat /proc/cmdline
        """,
    )
    lines = result.stdout.decode().split("\n")
    assert "bwrap" not in lines[0]
    assert lines[0].split()[1:3] == ["-ISE", "/run/box/execd.pyc"]
    assert lines[1] == "box"
    assert int(lines[2]) <= 4
    assert lines[3:] == [""]


async def test_the_hosts_environment_does_not_reach_the_box(backend, monkeypatch):
    monkeypatch.setenv("LONGARC_API_KEY", "secret-of-the-host")
    box = await backend.create(SandboxSpec(files={}))
    names = {line.split("=")[0] for line in (await box.exec(["env"])).stdout.decode().split()}
    assert names == {"PATH", "HOME", "USER", "LANG", "PWD", "PYTHONDONTWRITEBYTECODE"}
    everything = await bash(box, "cat /proc/*/environ")
    assert b"PATH=" in everything.stdout
    assert b"secret-of-the-host" not in everything.stdout


async def test_no_descriptor_of_the_host_is_inherited(box):
    result = await bash(box, "ls -l /proc/self/fd")
    targets = [line.split(" -> ")[1] for line in result.stdout.decode().split("\n") if "->" in line]
    assert targets[0] == "/dev/null"
    assert all(target.startswith(("/dev/null", "pipe:", "/proc/")) for target in targets)


async def test_there_is_no_network_but_the_boxs_own_loopback(box):
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    result = await python(
        box,
        f"""
        import socket
        for address in (("127.0.0.1", {port}), ("8.8.8.8", 53)):
            try:
                socket.create_connection(address, timeout=2)
                print("connected")
            except OSError as error:
                print(error.errno)
        own = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(own.getsockname())
        print("loopback")
        """,
    )
    server.close()
    assert result.stdout.decode().split() == ["111", "101", "loopback"], result
    interfaces = await bash(box, "tail -n +3 /proc/net/dev | cut -d: -f1")
    assert interfaces.stdout.split() == [b"lo"]


async def test_an_abstract_socket_of_the_host_is_out_of_reach(box):
    name = f"\0longarc-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        result = await python(
            box, f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        )
    assert b"ConnectionRefusedError" in result.stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("socket.socket(40, socket.SOCK_STREAM)", 97),
        ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", 97),
        ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", 97),
        ("os.memfd_create('x')", 38),
        ("call('ptrace', 0, 0, 0, 0)", 1),
        ("call('unshare', 0x10000000)", 1),
        ("call('mount', 0, 0, 0, 0, 0)", 1),
        ("call('keyctl', 0, 0, 0)", 1),
        ("call('perf_event_open', 0, 0, 0, 0, 0)", 1),
        ("call('userfaultfd', 0)", 38),
        ("call('io_uring_setup', 1, 0)", 38),
        ("call('bpf', 0, 0, 0)", 1),
        ("call('shmget', 0, 4096, 0o1600)", 38),
        ("call('inotify_init1', 0)", 38),
        ("call('process_vm_readv', 1, 0, 0, 0, 0, 0)", 1),
        ("resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))", 1),
        ("fcntl.ioctl(0, 0x5412, b'x')", 1),
        ("call('mq_open', b'/q', 0o102, 0o600, 0)", 38),
        ("call('semget', 0, 1, 0o1600)", 38),
        ("os.setpriority(os.PRIO_PROCESS, 1, 19)", 1),
        ("os.setpriority(os.PRIO_USER, 0, 19)", 1),
        ("os.sched_setaffinity(1, {0})", 1),
        ("os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))", 1),
    ],
)
async def test_a_dangerous_system_call_is_refused(box, code, error):
    index = 0 if platform.machine() == "x86_64" else 1
    numbers = {name: calls[index] for name, calls in {**DENIED, **ABSENT}.items()}
    result = await python(
        box,
        f"""
        import ctypes, fcntl, os, resource, socket
        libc = ctypes.CDLL(None, use_errno=True)
        def call(name, *arguments):
            if libc.syscall({numbers!r}[name], *arguments) < 0:
                raise OSError(ctypes.get_errno(), name)
        try:
            {code}
            print("allowed")
        except OSError as error:
            print(error.errno)
        """,
    )
    assert result.stdout.decode().strip() == str(error), result


async def test_the_box_has_no_capability_and_cannot_get_one(box):
    status = (await bash(box, "cat /proc/self/status")).stdout.decode()
    fields = dict(line.split(":\t") for line in status.split("\n") if ":\t" in line)
    assert {fields[f"Cap{kind}"].strip("0") for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {""}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert (await bash(box, "unshare -U true")).rc != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to see that it is given up")
async def test_a_box_started_by_root_belongs_to_the_sandbox_user(box):
    children = (
        Path(f"/proc/{box.vessel.process.pid}/task/{box.vessel.process.pid}/children")
        .read_text()
        .split()
    )
    for pid in (box.vessel.process.pid, box.vessel.server_pid, *children):
        uids = next(
            line
            for line in Path(f"/proc/{pid}/status").read_text().split("\n")
            if line.startswith("Uid")
        )
        assert set(uids.split()[1:]) == {"64000"}


async def test_signals_do_not_harm_process_one(box):
    result = await bash(box, "for s in TERM INT HUP PIPE CHLD USR1 STOP KILL; do kill -$s 1; done")
    assert result.failure is None
    assert (await box.exec(["echo", "alive"])).stdout == b"alive\n"


HOST_THAT_DIES = """
import asyncio, os, signal, sys
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.records.ports import SandboxSpec

async def main(marker):
    backend = BwrapBackend()
    box = await backend.create(SandboxSpec(files={}))
    await box.exec(["bash", "-c", f"setsid -f sleep {marker}; sleep {marker} & true"])
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_host_that_is_killed_leaves_no_process(capabilities, processes_with):
    marker = f"8{uuid.uuid4().int % 10**12}"
    done = subprocess.run(
        [sys.executable, "-c", HOST_THAT_DIES, marker],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ready\n", done.stderr
    assert done.returncode == -9
    for _ in range(100):
        if not processes_with(marker):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {processes_with(marker)}")


UNPRIVILEGED = """
import asyncio, os, sys
import concurrent.futures.thread, encodings.idna, selectors, subprocess
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.records.ports import SandboxSpec

async def main():
    backend = BwrapBackend()
    box = await backend.create(SandboxSpec(files={"a": b"1"}))
    result = await box.exec(["bash", "-c", "cat a; echo; id -un; touch /x || echo x > /tmp/y; cat /tmp/y"])
    await backend.close()
    print(os.geteuid(), result.stdout.decode().split())

asyncio.run(asyncio.sleep(0))
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_an_unprivileged_user_gets_the_same_box(capabilities):
    folders = [Path(longarc.__file__), *Path(longarc.__file__).parents]
    if not all(folder.stat().st_mode & 0o005 for folder in folders):
        pytest.skip("the checkout is in a folder that uid nobody may not enter")
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "65534 ['1', 'agent', 'x']\n", done.stderr
