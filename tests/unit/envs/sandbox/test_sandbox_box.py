import asyncio
import os
import uuid
from pathlib import Path

import pytest

from longarc.envs.sandbox.backend import BwrapBackend
from longarc.errors import SandboxError
from longarc.records.ports import SandboxSpec


async def bash(box, script, **options):
    return await box.exec(["bash", "-c", script], **options)


async def test_a_command_runs_in_the_workspace_and_sees_its_files(box):
    result = await bash(box, "pwd; cat notes/a.txt b.txt; echo oops >&2; exit 3")
    assert result.stdout == b"/workspace\nalpha\nbeta\n"
    assert result.stderr == b"oops\n"
    assert (result.rc, result.timed_out, result.num_dropped_bytes, result.failure) == (
        3,
        False,
        0,
        None,
    )
    assert result.wall_s > 0


async def test_a_command_that_a_signal_ends_has_a_negative_status(box):
    assert (await bash(box, "kill -TERM $$")).rc == -15


async def test_a_missing_program_is_the_agents_mistake_and_not_a_crash(box):
    missing = await box.exec(["no-such-program"])
    assert (missing.rc, missing.failure) == (127, None)
    assert b"no-such-program" in missing.stderr
    await box.write("plain.txt", b"not a program")
    assert (await box.exec(["/workspace/plain.txt"])).rc == 126
    assert (await box.exec(["echo", "a\0b"])).rc == 126
    assert (await box.exec(["true"])).rc == 0


async def test_text_that_is_not_valid_and_arguments_without_end_do_no_harm(box):
    odd = "\ud83d and \udcff"
    assert (await box.exec(["printf", "%s", odd])).stdout == b"? and ?"
    assert (await box.exec(["printf", "%s", "\udcff"])).stdout == b"\xff"
    await box.write(odd, b"1")
    await box.write("\udcff", b"2")
    assert (await box.read(odd), await box.read("\udcff")) == (b"1", b"2")
    with pytest.raises(FileNotFoundError):
        await box.read("missing \udcff")
    with pytest.raises(OSError, match="null byte"):
        await box.read("a\0b")
    too_long = await box.exec(["echo", "x" * (1 << 22)])
    assert (too_long.rc, too_long.failure) == (126, None)
    assert b"Argument list too long" in too_long.stderr


async def test_standard_input_arrives_whole_even_when_larger_than_a_pipe(box):
    data = os.urandom(300_000)
    result = await box.exec(["sha256sum"], stdin=data)
    expected = await bash(box, "cat > f; sha256sum < f", stdin=data)
    assert result.stdout == expected.stdout
    assert (await box.read("f")) == data
    assert (await box.exec(["cat"])).stdout == b""
    assert (await box.exec(["true"], stdin=data)).rc == 0


async def test_arguments_are_not_touched_by_a_shell(box):
    result = await box.exec(["printf", "%s|", "a b", "$HOME", "*", "", "\u00e9\n"])
    assert result.stdout.decode() == "a b|$HOME|*||\u00e9\n|"


async def test_files_are_written_and_read_with_their_folders(box):
    data = bytes(range(256)) * 1000
    await box.write("new/deep/x.bin", data)
    await box.write("/tmp/y", b"1")
    await box.write("/tmp/y", b"")
    assert await box.read("new/deep/x.bin") == data
    assert await box.read("/workspace/new/deep/x.bin") == data
    assert await box.read("/tmp/y") == b""


async def test_a_file_operation_that_the_box_refuses_raises_its_own_error(box):
    with pytest.raises(FileNotFoundError):
        await box.read("nothing")
    with pytest.raises(IsADirectoryError):
        await box.write("notes", b"")
    await bash(box, "mkfifo pipe")
    with pytest.raises(OSError, match="not a regular file"):
        await box.read("pipe")
    await bash(box, "truncate -s 17M large")
    with pytest.raises(OSError, match="more than 16777216 bytes"):
        await box.read("large")
    with pytest.raises(OSError, match="at most 16777216 at a time"):
        await box.write("large", bytes((16 << 20) + 1))
    assert (await box.exec(["true"])).rc == 0


async def test_the_smallest_box_moves_the_largest_file_and_output(backend):
    data = os.urandom(16 << 20)
    spec = SandboxSpec(files={"16": data}, memory_bytes=64 << 20, output_bytes=8 << 20)
    box = await backend.create(spec)
    assert await box.read("16") == data
    await box.write("again", data)
    assert (await bash(box, "cmp 16 again && rm again")).rc == 0
    assert (await box.exec(["wc", "-c"], stdin=data)).stdout == b"16777216\n"
    assert (await box.exec(["cat", "16"])).stdout == data[: 8 << 20]


async def test_a_background_process_lives_on_and_does_not_hold_the_command(box):
    waiting = "until [ -e ask ]; do sleep 0.01; done; echo answer > told"
    first = await bash(box, f"({waiting}; sleep 1000; echo late) & echo early")
    assert first.stdout == b"early\n"
    assert not first.timed_out
    second = await bash(box, "touch ask; until [ -s told ]; do sleep 0.01; done; cat told")
    assert second.stdout == b"answer\n"


async def test_two_boxes_share_nothing_that_can_be_written(backend):
    spec = SandboxSpec(files={"a": b"1"})
    first, second = await backend.create(spec), await backend.create(spec)
    await bash(first, "echo 2 > a; echo 2 > /tmp/t; echo 2 > ~/h; echo 2 > /dev/shm/s; sleep 99 &")
    seen = await bash(second, "cat a; ls /tmp ~ /dev/shm; pgrep sleep")
    assert seen.stdout == b"1/dev/shm:\n\n/home/agent:\n\n/tmp:\n"


async def test_commands_of_one_box_wait_for_each_other_and_boxes_do_not(backend):
    spec = SandboxSpec(files={})
    first, second = await backend.create(spec), await backend.create(spec)
    waiting = asyncio.ensure_future(bash(first, "while [ ! -e go ]; do sleep 0.01; done; echo 1"))
    assert (await bash(second, "echo 2")).stdout == b"2\n"
    assert not waiting.done()
    queued = asyncio.ensure_future(bash(first, "echo 3"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await queued).failure == "env_crashed"  # the cancelled command took its box with it


async def test_nothing_is_left_of_a_closed_box(box, processes_with):
    marker = f"7{uuid.uuid4().int % 10**12}"
    await bash(box, f"setsid -f sleep {marker}; trap '' TERM HUP; nohup sleep {marker} & true")
    mounts = len(Path("/proc/self/mounts").read_text().split("\n"))
    async with asyncio.timeout(20):
        while (
            len(processes_with(marker)) < 2
        ):  # the shell returns between their fork and their exec
            await asyncio.sleep(0.01)
    await box.close()
    await box.close()
    assert processes_with(marker) == []
    assert len(Path("/proc/self/mounts").read_text().split("\n")) == mounts
    assert box.vessel.process.returncode is not None


async def test_a_closed_box_refuses_politely(box):
    await box.close()
    result = await box.exec(["true"])
    assert (result.rc, result.failure) == (None, "env_crashed")
    assert b"it was closed" in result.stderr
    with pytest.raises(SandboxError, match="closed; open a new one"):
        await box.read("b.txt")


async def test_closing_the_backend_closes_its_boxes_and_ends_a_running_command(backend):
    box = await backend.create(SandboxSpec(files={}))
    running = asyncio.ensure_future(box.exec(["sleep", "1000"], timeout_s=1000))
    await box.exec(["true"]) if running.done() else await asyncio.sleep(0)
    await backend.close()
    assert (await running).failure == "env_crashed"
    with pytest.raises(SandboxError, match="backend is closed"):
        await backend.create(SandboxSpec(files={}))


async def test_create_waits_for_a_free_place(capabilities):
    backend = BwrapBackend(max_boxes=1)
    first = await backend.create(SandboxSpec(files={}))
    waiting = asyncio.ensure_future(backend.create(SandboxSpec(files={})))
    assert (await first.exec(["true"])).rc == 0
    assert not waiting.done()
    await first.close()
    second = await waiting
    assert (await second.exec(["true"])).rc == 0
    await backend.close()


async def test_a_cancelled_create_leaves_no_process_and_no_place_taken(capabilities):
    backend = BwrapBackend(max_boxes=1)
    for num_yields in (0, 1, 5, 50):
        creating = asyncio.ensure_future(backend.create(SandboxSpec(files={})))
        for _ in range(num_yields):
            await asyncio.sleep(0.0005)
        if creating.cancel():
            with pytest.raises(asyncio.CancelledError):
                await creating
        else:  # it was quicker than that
            await creating.result().close()
    box = await backend.create(SandboxSpec(files={}))
    assert (await box.exec(["true"])).rc == 0
    await backend.close()


async def test_it_works_on_uvloop_too(capabilities):
    uvloop = pytest.importorskip("uvloop")

    async def run() -> bytes:
        backend = BwrapBackend()
        box = await backend.create(SandboxSpec(files={}))
        result = await box.exec(["echo", "hello"])
        await backend.close()
        return result.stdout

    def in_own_loop() -> bytes:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())

    assert await asyncio.to_thread(in_own_loop) == b"hello\n"
