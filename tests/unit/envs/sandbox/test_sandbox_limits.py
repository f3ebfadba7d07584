import asyncio
import contextlib
import uuid

import pytest

from longarc.envs.sandbox.backend import setup_request
from longarc.errors import ConfigError
from longarc.records.ports import SandboxSpec


async def bash(box, script, **options):
    return await box.exec(["bash", "-c", script], **options)


async def test_a_timeout_ends_children_that_hide_and_ignore_signals(box, processes_with):
    marker = f"9{uuid.uuid4().int % 10**12}"
    hiding = f"setsid -f bash -c \"trap '' TERM HUP INT; sleep {marker}; sleep {marker}\""
    result = await bash(box, f"echo begun; {hiding}; {hiding}; sleep {marker}", timeout_s=0.5)
    assert (result.rc, result.timed_out, result.failure) == (None, True, None)
    assert result.stdout == b"begun\n"
    assert processes_with(marker) == []
    assert (await box.exec(["echo", "next"])).stdout == b"next\n"


async def test_a_fork_bomb_is_the_agents_failure_and_the_box_survives_it(box):
    result = await bash(box, "f() { f | f & }; f; sleep 100", timeout_s=1)
    assert (result.timed_out, result.failure) == (True, None)
    assert (await box.exec(["echo", "next"])).stdout == b"next\n"


FILL = """
import os, time
if os.fork():
    os._exit(0)
num_children = 0
while num_children < 9:
    try:
        if not os.fork():
            time.sleep(1000)
        num_children += 1
    except BlockingIOError:
        time.sleep(0.01)
open("full", "w").write("yes")
try:
    os.fork()
except BlockingIOError:
    open("refused", "w").write("yes")
time.sleep(1000)
"""


async def test_processes_are_limited_per_box_and_leftovers_do_not_lock_the_agent_out(backend):
    spec = SandboxSpec(files={}, num_processes=10)
    first, second = await backend.create(spec), await backend.create(spec)
    await first.exec(["python3", "-c", FILL])
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError):
            if await first.read("refused") == b"yes":
                break
        await asyncio.sleep(0.01)
    assert (await bash(second, "for i in 1 2 3 4 5; do sleep 9 & done; echo fine")).stdout == (
        b"fine\n"
    )
    assert (await first.exec(["ls"])).stdout == b"full\nrefused\n"


async def test_on_an_old_kernel_the_number_of_processes_is_watched_instead(backend):
    spec = SandboxSpec(files={}, num_processes=10)
    new, old = (setup_request(spec, kernel=release) for release in ("6.1.0-49", "5.10.0-8-amd64"))
    assert b"RLIMIT_NPROC 11" in new
    assert set(new) - set(old) == {b"RLIMIT_NPROC 11"}
    box = await backend.create(SandboxSpec(files={}))
    await box.request(old, timeout_s=60)
    result = await bash(box, "for i in $(seq 20); do sleep 1000 & done; wait", timeout_s=60)
    assert (result.rc, result.timed_out) == (-9, False)
    assert b"more than 10 processes" in result.stderr


async def test_all_writable_places_share_one_quota(backend):
    box = await backend.create(SandboxSpec(files={"a": b"1"}, disk_bytes=8 << 20))
    result = await bash(
        box,
        """
        for place in /workspace /tmp ~ /dev/shm; do head -c 3M /dev/zero > $place/fill; done
        stat -c %s /workspace/fill /tmp/fill ~/fill /dev/shm/fill
        """,
    )
    sizes = [int(line) for line in result.stdout.split()]
    assert sizes[:2] == [3 << 20, 3 << 20]
    assert sum(sizes) <= 8 << 20
    assert b"No space left" in result.stderr
    with pytest.raises(OSError, match="No space left"):
        await box.write("more", bytes(1 << 20))
    await bash(box, "rm /tmp/fill")
    await box.write("more", bytes(1 << 20))


async def test_many_empty_files_end_the_command_and_can_be_removed(backend):
    box = await backend.create(SandboxSpec(files={}, disk_bytes=1 << 20))
    code = "import os\nfor i in range(10**7): os.close(os.open(f'/tmp/{i}', os.O_CREAT))"
    result = await box.exec(["python3", "-c", code], timeout_s=60)
    assert (result.rc, result.timed_out, result.failure) == (-9, False, None)
    assert b"more than 4096 files" in result.stderr
    assert (await bash(box, "sleep 0.5; rm -rf /tmp/*; echo cleaned")).stdout == b"cleaned\n"


async def test_output_beyond_the_cap_is_dropped_and_counted(backend):
    box = await backend.create(SandboxSpec(files={}, output_bytes=1000))
    result = await bash(box, "head -c 600 /dev/zero >&2; sleep 0.1; head -c 200000 /dev/zero")
    assert (len(result.stderr), len(result.stdout)) == (600, 400)
    assert result.num_dropped_bytes == 200_000 - 400
    assert result.rc == 0


async def test_a_flood_of_output_is_stopped(box):
    result = await box.exec(["yes"], timeout_s=60)
    assert (result.rc, result.timed_out, result.failure) == (None, False, None)
    assert len(result.stdout) == 1 << 16
    assert result.num_dropped_bytes > 64 << 20
    assert (await box.exec(["echo", "next"])).stdout == b"next\n"


async def test_one_process_cannot_take_more_memory_than_the_box_may(backend):
    box = await backend.create(SandboxSpec(files={}, memory_bytes=64 << 20))
    result = await box.exec(["python3", "-c", "bytearray(100 << 20)"])
    assert (result.rc, result.failure) == (1, None)
    assert b"MemoryError" in result.stderr


@pytest.mark.parametrize(
    "hog",
    [
        "import time; b = bytearray(40 << 20); b[::4096] = bytes(10240 * [1]); time.sleep(100)",
        "import mmap, time; b = mmap.mmap(-1, 40 << 20); b.write(bytes(40 << 20)); time.sleep(100)",
    ],
    ids=["private", "shared"],
)
async def test_the_processes_of_a_box_together_cannot_either(backend, hog):
    box = await backend.create(SandboxSpec(files={}, memory_bytes=96 << 20))
    result = await bash(box, f"for i in 1 2 3 4; do python3 -c '{hog}' & done; wait", timeout_s=60)
    assert (result.rc, result.timed_out, result.failure) == (-9, False, None)
    assert b"more than 100663296 bytes of memory" in result.stderr
    assert (await box.exec(["echo", "next"])).stdout == b"next\n"


async def test_memory_that_processes_share_counts_once(backend):
    box = await backend.create(SandboxSpec(files={}, memory_bytes=96 << 20))
    code = """
import os, time
b = bytearray(40 << 20); b[::4096] = bytes(10240 * [1])
for i in range(4):
    if not os.fork():
        time.sleep(1); os._exit(0)
for i in range(4):
    os.wait()
print("done")
"""
    result = await box.exec(["python3", "-c", code], timeout_s=60)
    assert result.stdout == b"done\n", result


async def test_a_file_larger_than_the_disk_and_a_core_dump_are_refused(box):
    limits = (await box.exec(["cat", "/proc/self/limits"])).stdout.decode()
    rows = {line[:25].strip(): line[25:].split()[0] for line in limits.split("\n")[1:] if line}
    assert rows["Max file size"] == str(64 << 20)
    assert rows["Max core file size"] == "0"
    assert rows["Max processes"] == "65"
    assert rows["Max data size"] == str(1 << 30)


async def test_a_box_ends_with_its_lifetime_and_that_is_not_a_crash(backend, processes_with):
    marker = f"6{uuid.uuid4().int % 10**12}"
    box = await backend.create(SandboxSpec(files={}, lifetime_s=0.5))
    result = await box.exec(["sleep", marker], timeout_s=1000)
    assert (result.rc, result.timed_out, result.failure) == (None, True, None)
    assert b"lifetime of 0.5 s" in result.stderr
    again = await box.exec(["true"])
    assert (again.timed_out, again.failure) == (True, None)
    await box.close()
    assert processes_with(marker) == []


async def test_the_event_loop_keeps_turning_while_boxes_work(backend):
    """Every step of a box yields; had one blocked on the box, this would never end."""
    box = await backend.create(SandboxSpec(files={}))
    running = asyncio.ensure_future(
        bash(box, "until [ -e go ]; do sleep 0.01; done; cat go", timeout_s=60)
    )
    other = await backend.create(SandboxSpec(files={}))
    assert (await other.exec(["echo", "meanwhile"])).stdout == b"meanwhile\n"
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 1000}, "memory_bytes is 1000; allowed is"),
        ({"disk_bytes": 0}, "disk_bytes is 0; allowed is"),
        ({"num_processes": 0}, "num_processes is 0; allowed is"),
        ({"output_bytes": 0}, "output_bytes is 0; allowed is"),
        ({"output_bytes": 1 << 30}, "allowed is 1 to 16777216"),
        ({"lifetime_s": float("nan")}, "lifetime_s is nan"),
        ({"files": {"../x": b""}}, "'../x'"),
        ({"files": {"/etc/x": b""}}, "'/etc/x'"),
        ({"files": {"a//b": b""}}, "'a//b'"),
        ({"files": {"": b""}}, "the path ''"),
        ({"files": {"a\0": b""}}, "plain relative paths"),
        ({"files": {"a": b"", "a/b/c": b""}}, "both as a file and as a folder"),
        ({"files": {"a": bytes(1 << 20)}, "disk_bytes": 1 << 19}, "room for 524288: raise"),
        ({"files": {"a": bytes(17 << 20)}, "memory_bytes": 64 << 20}, "room for 16777216"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_with_its_value(change, message):
    with pytest.raises(ConfigError, match=message):
        setup_request(SandboxSpec(**({"files": {}} | change)))


async def test_exec_needs_a_program_and_a_time(box):
    with pytest.raises(ValueError, match="at least one argument"):
        await box.exec([])
    with pytest.raises(ValueError, match="more than 0 seconds"):
        await box.exec(["true"], timeout_s=0)
    with pytest.raises(ValueError, match="at most 16777216 bytes"):
        await box.exec(["cat"], stdin=bytes((16 << 20) + 1))
