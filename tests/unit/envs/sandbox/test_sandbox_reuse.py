"""A backend with ``max_idle`` gives the processes of a closed box to a later one, and nothing else."""

import asyncio
import os
import signal

import pytest

from longarc.envs.sandbox.backend import BwrapBackend
from longarc.records.ports import SandboxSpec

EMPTY = SandboxSpec(files={})
LOOK = """
cat /proc/self/limits
for place in /workspace /tmp ~ /dev/shm; do
    stat -c '%n %a %h' $place
    find $place -mindepth 1
    getfattr -d $place 2>&1 | grep -v 'command not found'
done
set -- /proc/[0-9]*; echo $#; nice; pwd; cat /proc/net/unix | wc -l
"""


@pytest.fixture
async def reusing(capabilities):
    backend = BwrapBackend(max_boxes=4, max_idle=2)
    yield backend
    await backend.close()


async def bash(box, script, **options):
    return await box.exec(["bash", "-c", script], **options)


async def test_a_later_box_finds_nothing_of_an_earlier_one(reusing):
    spec = SandboxSpec(files={"a/b.txt": b"mine", "c": b"1"})
    first = await reusing.create(spec)
    fresh = await bash(first, LOOK)
    await bash(
        first,
        """
        mkdir -p deep/er /tmp/locked; echo secret > deep/er/x; ln -s /usr link; mkfifo pipe
        echo secret > /tmp/locked/y; chmod 000 /tmp/locked deep; echo s > ~/.bashrc
        echo s > /dev/shm/z; echo changed > c; chmod 700 /workspace /tmp; touch ~/' odd
name'
        setsid -f sleep 1000; nice -n 5 sleep 1000 & exec 9<>/dev/tcp/127.0.0.1/1
        """,
    )
    await first.exec(
        ["python3", "-c", "import os; os.setxattr('/workspace', 'user.note', b'secret')"]
    )
    await first.close()
    second = await reusing.create(spec)
    assert second.vessel is first.vessel
    assert second.id != first.id
    assert (await bash(second, LOOK)).stdout == fresh.stdout
    assert (await second.read("c"), await second.read("a/b.txt")) == (b"1", b"mine")
    xattrs = await second.exec(["python3", "-c", "import os; print(os.listxattr('/workspace'))"])
    assert xattrs.stdout == b"[]\n"
    assert (await first.exec(["true"])).failure == "env_crashed"  # the old handle stays closed


async def test_only_a_box_of_the_same_limits_is_reused(reusing):
    first = await reusing.create(EMPTY)
    await first.close()
    other = await reusing.create(SandboxSpec(files={}, disk_bytes=1 << 20))
    assert other.vessel is not first.vessel
    same = await reusing.create(SandboxSpec(files={"new": b"2"}, output_bytes=5, lifetime_s=77.0))
    assert same.vessel is first.vessel
    assert (await bash(same, "cat new; echo 123456")).stdout == b"21234"


async def test_no_more_are_kept_than_allowed_and_none_after_the_end(capabilities):
    backend = BwrapBackend(max_boxes=4, max_idle=1)
    first, second = await backend.create(EMPTY), await backend.create(EMPTY)
    await first.close()
    await second.close()
    assert first.vessel.process.poll() is None
    assert second.vessel.process.poll() is not None
    third = await backend.create(EMPTY)
    await backend.close()
    assert third.vessel.process.poll() is not None


async def test_many_that_close_together_respect_the_limit(reusing):
    boxes = [await reusing.create(EMPTY) for _ in range(4)]
    await asyncio.gather(*(box.close() for box in boxes))
    assert sum(box.vessel.process.poll() is None for box in boxes) == 2


async def test_idle_boxes_of_limits_that_are_not_in_use_make_room(reusing):
    old = [await reusing.create(EMPTY) for _ in range(2)]
    for box in old:
        await box.close()
    other = SandboxSpec(files={}, disk_bytes=1 << 20)
    first = await reusing.create(other)
    await first.close()
    assert (await reusing.create(other)).vessel is first.vessel
    assert [box.vessel.process.poll() is None for box in old] == [False, True]


@pytest.mark.parametrize("how", ["cancelled", "expired", "too many files", "too deep"])
async def test_a_box_that_cannot_be_cleaned_is_ended(reusing, how):
    lifetime_s = 0.2 if how == "expired" else 600.0
    box = await reusing.create(SandboxSpec(files={}, lifetime_s=lifetime_s))
    if how == "cancelled":
        running = asyncio.ensure_future(box.exec(["sleep", "100"]))
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    elif how == "expired":
        assert (await box.exec(["sleep", "100"])).timed_out
    elif how == "too many files":
        assert (await bash(box, "cd /tmp; touch $(seq 5000)")).rc == 0
    else:
        deep = "import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')"
        assert (await box.exec(["python3", "-c", deep])).rc == 0
    await box.close()
    assert box.vessel.process.poll() is not None
    again = await reusing.create(EMPTY)
    assert (await again.exec(["ls", "/workspace", "/tmp"])).stdout == b"/tmp:\n\n/workspace:\n"


async def test_an_idle_box_that_died_is_replaced(reusing):
    box = await reusing.create(EMPTY)
    await box.close()
    os.kill(box.vessel.server_pid, signal.SIGKILL)
    again = await reusing.create(EMPTY)
    assert again.vessel is not box.vessel
    assert (await again.exec(["echo", "hello"])).stdout == b"hello\n"
