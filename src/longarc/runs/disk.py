"""What a disk refuses, as an error that names the place, what was to be written there and what is free."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from longarc.errors import ResourceError

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Error numbers of a place that takes no more."""
_UNITS: Final = tuple(
    (unit, 1000**power) for power, unit in reversed([*enumerate(("kB", "MB", "GB", "TB", "PB"), 1)])
)


@contextmanager
def writing(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn what the file system refuses inside the block into a ``ResourceError``.

    Args:
        path: the file or directory that is written.
        num_bytes: what it takes; where less is free, nothing is begun. None is not known [bytes].

    Raises:
        ResourceError: there is too little room, or the system refuses a file.
    """
    free = free_bytes(path)
    if num_bytes is not None and free is not None and free < num_bytes:
        raise ResourceError(_refusal(path, "there is too little room", num_bytes))
    try:
        yield
    except OSError as error:
        raise ResourceError(
            _refusal(path, error.strerror or str(error), num_bytes, number=error.errno)
        ) from error


def free_bytes(path: Path) -> int | None:
    """Return how much this user may still write where a path is or would be [bytes]; None where nobody says."""
    try:
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        stats = os.statvfs(there)
    except OSError:
        return None
    # Some file systems of a network tell no sizes at all.
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else None


def size_text(num_bytes: int) -> str:
    """Return a size for people, in units of 1000: ``1.5 GB``."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def _refusal(path: Path, reason: str, num_bytes: int | None, number: int | None = None) -> str:
    needed = "" if num_bytes is None else f"It takes {size_text(num_bytes)}; "
    free = free_bytes(path)
    told = (
        "how much is free there is unknown" if free is None else f"{size_text(free)} are free there"
    )
    told = f"{needed}{told}" if needed else f"{told[0].upper()}{told[1:]}"
    fix = "free some space or give another place"
    if number is not None and number not in NO_ROOM:
        fix = "give a place that can be written to"
    return f"cannot write {path}: {reason}. {told}; {fix}"
