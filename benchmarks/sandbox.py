"""Measure the sandbox: start, exec, close, memory, time-outs, what is left behind.

    python benchmarks/sandbox.py [--boxes 64] [--repeats 25] [--unprivileged] [--quick]

The bars are for two idle cores; there is no peer. ``--unprivileged`` (needs root) measures as uid nobody.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from common import Table, positive

from longarc.envs.sandbox.backend import BwrapBackend
from longarc.envs.sandbox.box import BwrapSandbox
from longarc.records.ports import SandboxSpec

NOBODY = 65534
SPEC = SandboxSpec(files={f"d{i % 5}/file{i}.txt": b"some text\n" * 20 for i in range(30)})
HIDING = "trap '' TERM HUP INT; while :; do sleep 5; done"
VICTIM = """
import asyncio, os, sys
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.records.ports import SandboxSpec

async def main():
    box = await BwrapBackend().create(SandboxSpec(files={}))
    await box.exec(["bash", "-c", "setsid -f sleep " + sys.argv[1]])
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


class BoundedTable(Table):
    """A table whose bars are bounds on our own values."""

    def bounded(
        self,
        figure: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        holds = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        bar = f"<= {at_most:g} {unit}" if at_most is not None else f">= {at_least:g} {unit}"
        self.row(figure, f"{value:.2f} {unit}", bar=bar, holds=holds)


def num_mounts() -> int:
    return len(Path("/proc/self/mounts").read_text().split("\n"))


async def milliseconds(action: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await action()
    return (time.perf_counter() - started) * 1e3


def processes() -> dict[int, bytes]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return found


def box_pids(box: BwrapSandbox) -> set[int]:
    """Both bwraps and the exec server."""
    pids, found = [box.vessel.process.pid], set()
    while pids:
        found.add(pid := pids.pop())
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def box_memory_kib(box: BwrapSandbox) -> float:
    """Proportional memory of a box's processes."""
    total = 0
    for pid in box_pids(box):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # not ours to see; measured as root only
            return float("nan")
        total += sum(int(line.split()[1]) for line in rollup.split("\n") if line.startswith("Pss:"))
    return total


async def watch_loop(lags_ms: list[float]) -> None:
    """Note by how much a 1 ms sleep comes too late: what blocks the event loop shows here."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        lags_ms.append((time.perf_counter() - started) * 1e3 - 1)


async def single_box(
    table: BoundedTable, backend: BwrapBackend, repeats: int, seen_pids: set[int]
) -> None:
    starts, closes, execs = [], [], []
    lags: list[float] = []
    watching = asyncio.ensure_future(watch_loop(lags))
    for _ in range(repeats):
        started = time.perf_counter()
        box = await backend.create(SPEC)
        starts.append((time.perf_counter() - started) * 1e3)
        for _ in range(8):
            execs.append(await milliseconds(lambda box=box: box.exec(["true"])))
        seen_pids |= box_pids(box)
        closes.append(await milliseconds(box.close))
    watching.cancel()
    table.bounded("start, 30 files (median)", statistics.median(starts), "ms", at_most=50)
    table.bounded("exec of true (median)", statistics.median(execs), "ms", at_most=2)
    table.bounded("close (median)", statistics.median(closes), "ms", at_most=10)
    table.bounded("event loop held up (worst)", max(lags), "ms", at_most=10)


async def kept_box(table: BoundedTable, repeats: int) -> None:
    backend = BwrapBackend(max_idle=1)
    await (await backend.create(SPEC)).close()
    rounds = []

    async def use() -> None:
        await (await backend.create(SPEC)).close()

    for _ in range(repeats):
        rounds.append(await milliseconds(use))
    await backend.close()
    table.row("create and close of a kept box (median)", f"{statistics.median(rounds):.2f} ms")


async def many_boxes(
    table: BoundedTable, backend: BwrapBackend, num_boxes: int, seen_pids: set[int]
) -> None:
    started = time.perf_counter()
    boxes = await asyncio.gather(*(backend.create(SPEC) for _ in range(num_boxes)))
    table.row(f"start of {num_boxes} boxes", f"{time.perf_counter() - started:.2f} s")
    for box in boxes:
        seen_pids |= box_pids(box)
    memory = statistics.median(box_memory_kib(box) for box in boxes) / 1024
    if memory == memory:
        table.bounded("memory per idle box (PSS, median)", memory, "MiB", at_most=8)

    async def some(box: BwrapSandbox) -> None:
        for _ in range(20):
            await box.exec(["true"])

    rates = []
    for _ in range(3):
        spent = await milliseconds(lambda: asyncio.gather(*map(some, boxes)))
        rates.append(num_boxes * 20 / spent * 1e3)
    table.bounded(
        f"exec of true over {num_boxes} boxes (median)",
        statistics.median(rates),
        "/s",
        at_least=900,
    )
    spent = await milliseconds(lambda: asyncio.gather(*(box.close() for box in boxes)))
    table.row(f"close of {num_boxes} boxes", f"{spent:.0f} ms")


async def timeouts(table: BoundedTable, backend: BwrapBackend) -> None:
    box = await backend.create(SPEC)
    hide = f'for i in 1 2 3; do setsid -f bash -c "{HIDING}"; done; sleep 60'
    bomb = "f() { f | f & }; f; sleep 60"
    for name, script in (("hiding children", hide), ("a fork bomb", bomb)):
        over = []
        for _ in range(5):
            spent = await milliseconds(
                lambda script=script: box.exec(["bash", "-c", script], timeout_s=0.5)
            )
            over.append(spent - 500)
        table.bounded(f"time-out overshoot with {name} (worst of 5)", max(over), "ms", at_most=100)
    await box.close()


def host_killed(table: BoundedTable) -> None:
    marker = f"5{uuid.uuid4().int % 10**12}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, marker], stdout=subprocess.PIPE, env=environment
    ) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        victim.send_signal(signal.SIGKILL)
    time.sleep(0.1)
    left = sum(marker.encode() in command for command in processes().values())
    table.bounded("processes 100 ms after kill -9 of the host", left, "", at_most=0)


async def main(num_boxes: int, repeats: int) -> None:
    table = BoundedTable()
    seen_pids: set[int] = set()
    mounts = num_mounts()
    backend = BwrapBackend(max_boxes=num_boxes + 1)
    found = await backend.probe()
    if not found.is_usable:
        raise SystemExit(f"no sandbox on this machine: {found.problem}")
    table.row("bwrap", found.bwrap_version)
    table.row("uid", str(os.geteuid()))
    table.row("load average of the last minute", f"{os.getloadavg()[0]:.1f}")
    await single_box(table, backend, repeats, seen_pids)
    await kept_box(table, repeats)
    await many_boxes(table, backend, num_boxes, seen_pids)
    await timeouts(table, backend)
    if os.geteuid() != NOBODY:  # a new interpreter may not be within nobody's reach
        await asyncio.to_thread(host_killed, table)
    await backend.close()
    left = len(seen_pids & set(processes()))
    table.bounded("box processes left behind", left, "", at_most=0)
    more = num_mounts() - mounts
    table.bounded("mounts left behind", more, "", at_most=0)
    table.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--boxes", type=positive, default=64, help="boxes open at a time")
    parser.add_argument("--repeats", type=positive, default=25, help="starts to take the median of")
    parser.add_argument("--unprivileged", action="store_true", help="give up root first")
    parser.add_argument("--quick", action="store_true", help="two boxes: does it run at all?")
    options = parser.parse_args()
    if options.quick:
        options.boxes, options.repeats = 2, 2
    if options.unprivileged:
        asyncio.run(asyncio.sleep(0))  # loads what nobody may not be able to read
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    asyncio.run(main(options.boxes, options.repeats))
