"""Compiles the native kernels: ``python -m longarc.models.kernels.build``.

The library has a plain C interface, so it needs a C++ compiler and nothing else: no headers of Python or
torch, and it survives an upgrade of either. It is kept in the virtual environment under a name that
says what it was made from, so that a changed source or another processor never meets an old library.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from longarc.errors import ResourceError

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno"),
    "-ffp-contract=off",  # cpu/vec.h says why
)
_TIMEOUT_S = 600.0


def library_path() -> Path:
    """Return where the library for this source and this processor lies, or would lie."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join((*FLAGS, platform.machine(), _processor_features())).encode())
    return _directory() / f"longarc-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the kernels unless that was done before, and return the library.

    Raises:
        ResourceError: no compiler was found, or it failed; the message is one line.
    """
    target = library_path()
    if target.exists():
        return target
    compiler = _compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / target.name
        failure = ""
        for threads in (["-fopenmp"], []):
            failure = _compile(
                [compiler, *FLAGS, *threads, str(SOURCES / "native.cpp"), "-o", str(made)]
            )
            if not failure:
                # A rename, so that a process that starts meanwhile never loads half a file.
                os.replace(made, target)
                return target
    raise ResourceError(
        f"{compiler} did not compile the kernels: {failure}. Name another compiler in CXX; without the kernels torch "
        f"computes everything, slower"
    )


def _compile(command: list[str]) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return ""
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    return errors[0] if errors else f"exit status {result.returncode}"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise ResourceError(
        "no C++ compiler was found (looked for $CXX, c++, g++, clang++): install one or name it in CXX; without the "
        "kernels torch computes everything, slower"
    )


def _directory() -> Path:
    environment = Path(sys.prefix)
    if sys.prefix != sys.base_prefix and os.access(environment, os.W_OK):
        return environment / "share" / "longarc" / "kernels"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "longarc" / "kernels"


def _processor_features() -> str:
    """Return what ``-march=native`` depends on, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def main() -> int:
    """Build, say what happened in one line, and never fail: the eager path works without."""
    try:
        message = f"native kernels: {build()}"
    except (ResourceError, OSError) as error:
        message = f"native kernels were not built, everything runs without them, slower: {error}"
    sys.stdout.write(message + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
