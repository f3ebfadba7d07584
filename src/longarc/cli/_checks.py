"""The checks of ``longarc doctor``: each looks at one thing and says what it found and what to do."""

import asyncio
import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from longarc.models.room import available_bytes

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one check found."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """What to do; empty where all is well."""


def every_check() -> list[Check]:
    """Run all checks; takes a second or two."""
    checks: tuple[Callable[[], Check], ...] = (
        check_python,
        lambda: check_threads(os.environ, num_cores=len(os.sched_getaffinity(0))),
        check_memory,
        check_torch,
        check_compiler,
        check_kernels,
        check_sandbox,
        lambda: check_disk(Path.cwd()),
        lambda: check_temporary(Path("/dev/shm")),
    )
    return [check() for check in checks]


def check_python() -> Check:
    """Look at the interpreter."""
    found = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    )
    return Check(name="python", status="ok", detail=found)


def check_threads(environment: Mapping[str, str], *, num_cores: int) -> Check:
    """Look at the cores and at thread counts from outside, which may contradict the recipe's."""
    given = {k: v for k, v in environment.items() if k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    detail = f"{num_cores} cores" + "".join(f", {k}={v}" for k, v in sorted(given.items()))
    too_many = [k for k, v in given.items() if v.isdigit() and int(v) > num_cores]
    if too_many:
        return Check(
            name="threads",
            status="warn",
            detail=detail,
            fix=f"unset {' and '.join(sorted(too_many))}: more threads than cores wait for each other",
        )
    if num_cores < 2:
        return Check(
            name="threads",
            status="warn",
            detail=detail,
            fix="give the process 2 cores, so that sampling and training can overlap",
        )
    return Check(name="threads", status="ok", detail=detail)


def check_memory() -> Check:
    """Look at the memory that is free."""
    free_bytes = available_bytes() or 0
    detail = f"{free_bytes / 2**30:.1f} GiB available"
    if free_bytes < 4 * 2**30:
        return Check(
            name="memory", status="warn", detail=detail, fix="the quickstart wants up to 4 GiB"
        )
    return Check(name="memory", status="ok", detail=detail)


def check_torch() -> Check:
    """Look at torch without importing it, which takes seconds."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check(
            name="torch",
            status="fail",
            detail="not installed; recipes can be checked and runs read, but not trained",
            fix="pip install 'longarc[train]'",
        )
    if _numbers(version) < (2, 10):
        return Check(name="torch", status="fail", detail=version, fix="pip install 'torch>=2.10'")
    return Check(name="torch", status="ok", detail=version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def check_compiler() -> Check:
    """Look for what compiles the native kernels."""
    names = ("c++", "g++", "clang++")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        return Check(
            name="compiler",
            status="warn",
            detail="no C++ compiler; the slower kernels in plain torch are used",
            fix="apt install g++",
        )
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check(
            name="compiler",
            status="warn",
            detail=f"{compiler} does not run: {error}",
            fix="set CXX",
        )
    return Check(name="compiler", status="ok", detail=done.stdout.partition("\n")[0])


def check_kernels() -> Check:
    """Look for the compiled kernels and load them; does not compile."""
    from longarc.models.kernels.build import library_path

    path = library_path()
    if os.environ.get("LONGARC_NATIVE") == "0":
        detail, fix = "turned off by LONGARC_NATIVE=0", "unset LONGARC_NATIVE"
    elif not path.exists():
        detail = (
            "not compiled for this source and processor; the slower ones in plain torch are used"
        )
        fix = "python -m longarc.models.kernels.build"
    else:
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            detail, fix = f"{path} does not load: {error}", f"remove {path} and compile it again"
        else:
            return Check(name="kernels", status="ok", detail=str(path))
    return Check(name="kernels", status="warn", detail=detail, fix=fix)


def check_sandbox() -> Check:
    """Start a box and run a command in it: the only proof that namespaces are allowed."""
    from longarc.envs.sandbox.backend import BwrapBackend, SandboxCapabilities

    async def probe() -> SandboxCapabilities:
        backend = BwrapBackend(max_boxes=1)
        try:
            return await backend.probe()
        finally:
            await backend.close()

    found = asyncio.run(probe())
    if not found.is_usable:
        what = found.problem or "system calls of a box are not filtered (no seccomp)"
        return Check(
            name="sandbox",
            status="fail",
            detail=what,
            fix="stages whose tasks run commands need it; do what the line above says",
        )
    detail = f"bwrap {found.bwrap_version} at {found.bwrap_path}; namespaces and seccomp work"
    return Check(name="sandbox", status="ok", detail=detail)


def check_disk(directory: Path) -> Check:
    """Look at the space where runs are written by default."""
    free_bytes = shutil.disk_usage(directory).free
    detail = f"{free_bytes / 2**30:.1f} GiB free in {directory}"
    if free_bytes < 1 * 2**30:
        return Check(
            name="disk", status="fail", detail=detail, fix="free 1 GiB, or use --run-dir elsewhere"
        )
    if free_bytes < 5 * 2**30:
        return Check(
            name="disk",
            status="warn",
            detail=detail,
            fix="long runs want 5 GiB; or use --run-dir elsewhere",
        )
    return Check(name="disk", status="ok", detail=detail)


def check_temporary(shared_memory: Path) -> Check:
    """Look at shared memory, through which weights go from trainer to engine, and at temporary files."""
    temporary = Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0
    detail = (
        f"{shared_memory} has {free_bytes / 2**30:.2f} GiB free, temporary files go to {temporary}"
    )
    if not os.access(temporary, os.W_OK):
        return Check(
            name="tmpfs",
            status="fail",
            detail=detail,
            fix=f"make {temporary} writable, or set TMPDIR",
        )
    if free_bytes < 256 * 2**20:
        return Check(
            name="tmpfs",
            status="warn",
            detail=detail,
            fix="mount a tmpfs of 1 GiB at /dev/shm (in a container: --shm-size 1g)",
        )
    return Check(name="tmpfs", status="ok", detail=detail)
