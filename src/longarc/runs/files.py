"""Files that survive a crash: atomic replacement, and JSON lines whose torn tail is dropped."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from longarc.errors import ConfigError, ResourceError
from longarc.runs.disk import writing

UNFINISHED = ".longarc-unfinished"
"""File that stands in a new directory while it is written, locked by who writes."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader, or the next start after a crash, sees the old or the new one.

    Raises:
        ResourceError: the disk is full or the place is not writable; the old file is untouched.
    """
    with replacing(path, len(data)) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path, num_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Let the block write a file, which takes the place of ``path`` when the block ends well.

    Args:
        path: where.
        num_bytes: what it takes, if that is known; where less is free, nothing is begun [bytes].

    Raises:
        ResourceError: the disk is full or the place is not writable; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path, num_bytes):
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def make_directory(path: Path) -> None:
    """Make a directory and those above it; one that is there already is taken.

    Raises:
        ResourceError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"cannot make directory {path}: {error.strerror or error}; give a place that can be written to"
        ) from error


def check_new_directory(path: Path) -> None:
    """Refuse a place where no new directory can be made, before hours are spent on what goes there.

    Raises:
        ConfigError: it holds something (but for what a writer left that was killed), or a file is in its way.
        ResourceError: it cannot be looked at.
    """
    try:
        is_left = (path / UNFINISHED).is_file()
        is_free = is_left or (not any(path.iterdir()) if path.is_dir() else not path.exists())
        above = next(place for place in path.absolute().parents if place.exists())
    except OSError as error:
        raise ResourceError(f"cannot look at {path}: {error.strerror or error}") from error
    if not is_free:
        raise ConfigError(f"{path} is not an empty directory; give a new one")
    if not above.is_dir():
        raise ConfigError(f"{path} cannot be a directory, because {above} is a file; give another")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[None]:
    """Make a directory, and those above it, for what the block writes there; if that fails, nothing stays.

    Where the process is killed, ``UNFINISHED`` stays, and the next call clears the directory and begins anew.

    Raises:
        ConfigError: it holds something already, another process writes it, or a file is in its way.
        ResourceError: it cannot be made, or the disk has no room for what the block writes.
    """
    check_new_directory(path)
    made = [place for place in (path, *path.parents) if not place.exists()]
    with contextlib.ExitStack() as parts:
        try:
            make_directory(path)
            with writing(path):
                is_left = (path / UNFINISHED).is_file()
                mode = "r+" if is_left else "x"
                marker = parts.enter_context(open(path / UNFINISHED, mode))
        except BaseException:
            _remove_empty(made)
            raise
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is writing {path}; wait for it, or give another place"
            ) from error
        is_finished = os.fstat(marker.fileno()).st_nlink == 0
        if not is_left and any(inside.name != UNFINISHED for inside in path.iterdir()):
            (path / UNFINISHED).unlink()
            is_finished = True
        if is_finished:  # by another process, since it was looked at
            raise ConfigError(f"{path} is not an empty directory; give a new one")
        try:
            _clear(path, but=UNFINISHED)
            with writing(path):
                yield
                sync_directory(path)
                (path / UNFINISHED).unlink()
        except BaseException:
            _clear(path)
            _remove_empty(made)
            raise


def _clear(path: Path, *, but: str | None = None) -> None:
    for inside in path.iterdir() if path.is_dir() else ():
        if inside.name == but:
            continue
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside, ignore_errors=True)
        else:
            inside.unlink(missing_ok=True)


def _remove_empty(places: Sequence[Path]) -> None:
    for place in places:
        with contextlib.suppress(OSError):
            place.rmdir()


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: a rename is not before its directory is synced."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_document(value: object) -> bytes:
    """Encode JSON for people: indented, with a final newline."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


class JsonLines:
    """An append-only file of JSON objects, one a line."""

    def __init__(self, path: Path) -> None:
        """Open a file for appending, without what a crash left of its last line.

        Raises:
            ResourceError: the place is not writable.
        """
        self._path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            self._drop_torn_line()
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error.strerror or error}") from error

    def _drop_torn_line(self) -> None:
        data = self._path.read_bytes()
        if not data.endswith(b"\n"):
            self._file.truncate(data.rfind(b"\n") + 1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record; it survives a kill of this process.

        Raises:
            ResourceError: the disk is full; nothing of the record stays in the file.
        """
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            if written != len(line):
                # The kernel took what fitted; asking again says why the rest did not.
                self._file.write(line[written:])
        except OSError as error:
            # Where even that fails, the next start drops the torn line.
            os.ftruncate(self._file.fileno(), start)
            raise ResourceError(
                f"cannot append to {self._path}: {error.strerror}; free some space and resume the run"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a file of JSON lines; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [orjson.loads(line) for line in lines[:-1] if line]


def lock_holders(*paths: Path) -> list[int]:
    """Return the processes that hold a write lock on one of these files, as far as Linux tells (else none)."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        inodes = {str(path.stat().st_ino) for path in paths if path.exists()}
    except OSError:
        return []
    pids = set()
    for line in lines:
        # The fields are: number, type, mode, access, pid, device:inode, start, end.
        fields = line.split()
        if len(fields) >= 6 and fields[3] == "WRITE" and fields[5].split(":")[-1] in inodes:
            pids.add(int(fields[4]))
    return sorted(pid for pid in pids if pid > 0)
