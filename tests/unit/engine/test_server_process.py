import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from longarc.engine.server_process import ServerProcess
from longarc.errors import EngineError

SERVER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
print("serving", os.environ.get("PYTHONPATH"), os.environ["OWN"], flush=True)
time.sleep(600)
"""


async def started(tmp_path, *, code=SERVER, timeout_s=60.0):
    up = tmp_path / "up"

    async def is_up():
        return up.exists() and len(up.read_text().split()) == 2

    return await ServerProcess.start(
        [sys.executable, "-c", code, str(up)],
        name="the server",
        environment={"OWN": "value"},
        log=tmp_path / "server.log",
        is_up=is_up,
        timeout_s=timeout_s,
    )


def are_gone(pids, *, within_s=30.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        alive = [pid for pid in pids if _state(pid) not in (None, "Z")]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


async def test_a_server_is_stopped_with_its_children_and_gets_no_packages_of_ours(tmp_path):
    server = await started(tmp_path)
    pids = [int(pid) for pid in (tmp_path / "up").read_text().split()]
    assert server.failure is None
    await server.close()
    assert are_gone(pids)
    assert "serving None value" in (tmp_path / "server.log").read_text()
    assert "status" in server.failure


async def test_a_server_that_ends_early_is_an_error_with_the_end_of_its_log(tmp_path):
    with pytest.raises(EngineError, match=r"(?s)ended with status 3.*no such model"):
        await started(tmp_path, code="import sys; print('no such model'); sys.exit(3)")


async def test_a_server_that_never_answers_is_stopped(tmp_path):
    with pytest.raises(EngineError, match="does not answer after 1 s"):
        await started(tmp_path, code="import time; time.sleep(600)", timeout_s=1.0)


async def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    async def never():
        return False

    with pytest.raises(EngineError, match=r"cannot be started with /nowhere/python"):
        await ServerProcess.start(
            ["/nowhere/python"],
            name="the server",
            environment={},
            log=tmp_path / "log",
            is_up=never,
            timeout_s=1.0,
        )


def test_a_server_does_not_outlive_a_longarc_that_was_killed(tmp_path):
    up = tmp_path / "up"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import asyncio, pathlib, sys
                from longarc.engine.server_process import ServerProcess

                async def main(up, code):
                    async def is_up():
                        return up.exists() and len(up.read_text().split()) == 2
                    await ServerProcess.start(
                        [sys.executable, "-c", code, str(up)], name="s", environment={"OWN": "x"},
                        log=up.with_name("log"), is_up=is_up, timeout_s=60,
                    )
                    print("ready", flush=True)
                    await asyncio.sleep(600)

                asyncio.run(main(pathlib.Path(sys.argv[1]), sys.argv[2]))
            """),
            str(up),
            SERVER,
        ],
        stdout=subprocess.PIPE,
    )
    assert parent.stdout.readline() == b"ready\n"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert are_gone([int(pid) for pid in up.read_text().split()])
