"""What this machine offers a box: bubblewrap, a Python, a mount point, a user to become.

Looked up once per backend, in the spawner thread, because it runs programs and reads folders.
"""

import glob
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longarc.envs.sandbox.bubblewrap import Bubblewrap, find_bubblewrap
from longarc.errors import ConfigError, SandboxError

SANDBOX_UID = 64_000
"""User and group that boxes run as when LongArc itself runs as root; belongs to nobody on Debian."""
SCRATCH_CANDIDATES = ("/media", "/mnt", "/srv", "/opt")
SYSTEM_PYTHON = "/usr/bin/python3"
COMPILE = """
import importlib.util, marshal, sys
if sys.version_info < (3, 9):
    sys.exit("Python " + sys.version)
code = compile(sys.stdin.buffer.read(), "execd.py", "exec")
sys.stdout.buffer.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""
"""Writes a .pyc file: magic number, flags, time and size of no source, code."""
PACKAGE_FOLDERS = (
    "/usr/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/dist-packages",
    "/usr/lib/python3*/site-packages",
    "/usr/lib64/python3*/site-packages",
    "/usr/local/lib/python3*/site-packages",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts that hold for every box of a backend."""

    bubblewrap: Bubblewrap
    python: str
    """Interpreter of the exec server, by its path on the host and in the box."""
    python_prefix: str | None
    """Folder that must be visible for ``python``; None where /usr already shows it."""
    server: bytes
    """The exec server, compiled for ``python``: saves each box some milliseconds."""
    hidden_folders: tuple[str, ...]
    """Installed packages of the host, which may hold a task's solution: empty in the box."""
    scratch: str
    """An existing folder that the box's quota'd tmpfs covers, in the box's own mount table only."""
    uid: int
    """Who runs bwrap [uid]; the caller, or ``SANDBOX_UID`` when the caller is root."""
    gid: int
    setpriv: str | None
    """Program that changes to ``uid``; None where no change is needed."""


def look_up_host(bwrap_candidates: Sequence[str] | None = None) -> Host:
    """Find everything a box needs; blocks for some milliseconds.

    Raises:
        SandboxError: something is missing; says what and how to get it.
    """
    bubblewrap = find_bubblewrap(bwrap_candidates)
    is_root = os.geteuid() == 0
    python, prefix = _box_python(for_other_user=is_root)
    folders = [path for pattern in PACKAGE_FOLDERS for path in glob.glob(pattern)]
    if prefix is not None:
        folders += glob.glob(f"{prefix}/lib/python3*/site-packages")
    return Host(
        bubblewrap=bubblewrap,
        python=python,
        python_prefix=prefix,
        server=_compiled_server(python),
        hidden_folders=tuple(sorted(path for path in folders if not os.path.islink(path))),
        scratch=_scratch(shown=prefix),
        uid=SANDBOX_UID if is_root else os.geteuid(),
        gid=SANDBOX_UID if is_root else os.getegid(),
        setpriv=_setpriv() if is_root else None,
    )


def check_can_be_shown(host: Host, path: str) -> None:
    """Refuse a path that a box cannot show.

    Raises:
        ConfigError: it does not exist, the user of the box may not read it, or the box's own files cover it.
    """
    place = Path(path)
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path} does not exist or cannot be read, so a box cannot show it")
    if host.setpriv is not None and not _readable_by_all(place):
        raise ConfigError(
            f"{path} cannot be read by uid {host.uid}, as which boxes run when LongArc runs as root: install it where "
            f"every user may read it (below /opt or /srv, or chmod o+rX the folders above it), or run LongArc as the "
            f"user who owns it"
        )
    if (str(place.resolve()) + "/").startswith(host.scratch + "/"):
        raise ConfigError(
            f"{path} lies below {host.scratch}, over which a box mounts its own files; install it elsewhere"
        )


def _box_python(*, for_other_user: bool) -> tuple[str, str | None]:
    if os.access(SYSTEM_PYTHON, os.X_OK):
        return SYSTEM_PYTHON, None
    python = os.path.join(
        sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}"
    )
    if not os.access(python, os.X_OK) or (for_other_user and not _open_to_all(Path(python))):
        raise SandboxError(
            f"no Python for the exec server of a box: {SYSTEM_PYTHON} does not exist and {python} "
            f"cannot be used by uid {SANDBOX_UID}; install python3 from your system, or run LongArc "
            f"as the user who owns that interpreter"
        )
    is_visible = sys.base_prefix == "/usr" or sys.base_prefix.startswith("/usr/")
    return python, None if is_visible else sys.base_prefix


def _compiled_server(python: str) -> bytes:
    source = Path(__file__).with_name("execd.py").read_bytes()
    try:
        done = subprocess.run(
            [python, "-ISE", "-c", COMPILE],
            input=source,
            capture_output=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        raise SandboxError(
            f"{python} cannot run the exec server of a box ({error}; {said.decode()[-200:]!r}); "
            f"Python >= 3.9 is needed there: repair or update it"
        ) from error
    return done.stdout


def _open_to_all(path: Path) -> bool:
    """Whether any user may run ``path``: every folder above it and the file have o+x."""
    resolved = path.resolve()
    return all(part.stat().st_mode & stat.S_IXOTH for part in (resolved, *resolved.parents))


def _readable_by_all(path: Path) -> bool:
    """Whether any user may read ``path``: every folder above it has o+x, itself o+r, and o+x where it is a folder."""
    resolved = path.resolve()
    own = stat.S_IROTH | (stat.S_IXOTH if resolved.is_dir() else 0)
    is_open = all(folder.stat().st_mode & stat.S_IXOTH for folder in resolved.parents)
    return is_open and resolved.stat().st_mode & own == own


def _scratch(*, shown: str | None) -> str:
    for path in SCRATCH_CANDIDATES:
        hides = shown is not None and (shown + "/").startswith(path + "/")
        if os.path.isdir(path) and not os.path.islink(path) and not hides:
            return path
    raise SandboxError(
        f"none of {', '.join(SCRATCH_CANDIDATES)} is a folder; a box mounts its own memory file "
        f"system over one of them (in its own mount table only); create an empty /mnt"
    )


def _setpriv() -> str:
    if (path := shutil.which("setpriv")) is None:
        raise SandboxError(
            "setpriv (util-linux) is not on PATH; root needs it to start boxes as the unprivileged "
            f"uid {SANDBOX_UID}; install util-linux, or run LongArc as an unprivileged user"
        )
    return path
