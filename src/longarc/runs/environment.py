"""What a run was made with: code, interpreter, packages, machine."""

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import longarc


def describe_environment(
    *, seeds: Mapping[str, int], clock: Callable[[], float] = time.time
) -> dict[str, Any]:
    """Return what is needed to do a run again: JSON, without secrets and without host names.

    Args:
        seeds: every seed the run starts from, by purpose.
        clock: wall clock [seconds since the epoch].
    """
    return {
        "started_at_s": clock(),
        "longarc": longarc.__version__,
        "git_commit": _git_commit(Path(longarc.__file__).parent),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "threads": {n: os.environ[n] for n in sorted(os.environ) if n.endswith("_NUM_THREADS")},
        "packages": _packages(),
        "argv": sys.argv,
        "seeds": dict(seeds),
    }


def _packages() -> dict[str, str]:
    """Return the versions of what LongArc depends on, extras included, as far as installed."""
    try:
        requirements = metadata.requires("longarc") or []
    except metadata.PackageNotFoundError:
        return {}
    names = {
        re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0] for requirement in requirements
    }
    versions = {}
    for name in sorted(names, key=str.lower):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_commit(directory: Path) -> str | None:
    """Return the commit of the code, with ``+changes`` where files differ from it; None outside git."""
    # An installed copy may lie inside somebody else's repository: only tracked code has a commit.
    if _git(directory, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(directory, "status", "--porcelain", "--", ".") else "")


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
