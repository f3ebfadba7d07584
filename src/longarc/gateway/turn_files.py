"""A directory of turn logs, one file a session, from which a gateway goes on after any end of its process.

::

    run-7.jsonl    {"format":1,"session_id":"run-7","key_sha256":"..","sampling":{..},"thinking":true,"max_context_tokens":8192,..}
                   {turn 0, see turn_log}
                   {turn 1}
                   {"closed":true}             behind the last turn, once the key was revoked

A line is handed to the kernel before its turn is answered, so ``kill -9`` loses nothing that a client saw.
It is not synced to the disk line by line: when the machine itself stops, so do the rollouts. A line that a
kill cut short was never answered, and is dropped when the directory is opened again.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from longarc.errors import ConfigError, ContractError, ResourceError, boundary
from longarc.gateway.budget import SessionBudget
from longarc.records.sampling import Sampling
from longarc.runs.files import make_directory

_FORMAT: Final = 1
_CLOSED: Final = b'{"closed":true}\n'
_SUFFIX: Final = ".jsonl"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHead:
    """What a session was opened with; the first line of its file."""

    session_id: str
    key_sha256: str
    """Digest of the key: the key itself is stored nowhere."""
    sampling: Sampling
    thinking: bool
    max_context_tokens: int
    budget: SessionBudget


def check_session_id(session_id: str) -> None:
    """Refuse a name that is no plain file name.

    Raises:
        ConfigError: it has other characters, or too many.
    """
    if not _NAME.fullmatch(session_id):
        raise ConfigError(
            f"session_id={session_id[:80]!r} has to be 1 to 128 letters, digits, '.', '_' or '-', the first of "
            f"them a letter or a digit: it names a file"
        )


class TurnFiles:
    """The files of one gateway; no second process can open the directory meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Open a directory, made where it is missing.

        Raises:
            ConfigError: another process has it.
            ResourceError: it cannot be made or written.
        """
        make_directory(directory)
        self._directory = directory
        try:
            self._lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(f"cannot write {directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"another gateway has the sessions of {directory}; stop it, or give another directory"
            ) from error

    def close(self) -> None:
        """Let another process open the directory."""
        os.close(self._lock)

    def create(self, head: SessionHead) -> None:
        """Begin the file of a session.

        Raises:
            ConfigError: there is one of that name already.
            ResourceError: it cannot be written; nothing of it stays.
        """
        path = self._path(head.session_id)
        line = orjson.dumps({"format": _FORMAT, **asdict(head)}) + b"\n"
        try:
            with open(path, "xb", buffering=0, opener=_private):
                pass
        except FileExistsError as error:
            raise ConfigError(
                f"session {head.session_id!r} exists already; choose another session_id, or delete it first"
            ) from error
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error.strerror}") from error
        try:
            _append(path, line)
        except ResourceError:
            path.unlink(missing_ok=True)
            raise

    def append(self, session_id: str, index: int, payload: bytes) -> None:
        """Append a turn; satisfies ``TurnLog``.

        Raises:
            ResourceError: the disk is full or the file cannot be written; nothing of the turn stays.
        """
        _append(self._path(session_id), payload + b"\n")

    def mark_closed(self, session_id: str) -> None:
        """Note that the key was revoked."""
        _append(self._path(session_id), _CLOSED)

    def remove(self, session_id: str) -> None:
        """Delete the file of a session."""
        self._path(session_id).unlink(missing_ok=True)

    def heads(self) -> Iterator[tuple[SessionHead, bool]]:
        """Yield each session and whether it is closed, sorted by name; torn last lines are dropped.

        Raises:
            ContractError: a file is none of a session, or of another version.
        """
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            with open(path, "r+b") as file:
                first = file.readline()
                if not first.endswith(b"\n"):  # its key was told to nobody
                    path.unlink()
                    continue
                is_closed = _drop_torn_line(file)
            with boundary(ContractError, f"the first line of {path} is damaged"):
                yield _head(orjson.loads(first), path), is_closed

    def payloads(self, session_id: str) -> list[bytes]:
        """Return the turns of a session, oldest first.

        Raises:
            ResourceError: the file cannot be read.
        """
        path = self._path(session_id)
        try:
            lines = path.read_bytes().split(b"\n")[1:-1]
        except OSError as error:
            raise ResourceError(f"cannot read {path}: {error.strerror}") from error
        return lines[:-1] if lines and lines[-1] + b"\n" == _CLOSED else lines

    def _path(self, session_id: str) -> Path:
        return self._directory / f"{session_id}{_SUFFIX}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _append(path: Path, line: bytes) -> None:
    # Opened each time: thousands of sessions would be more files than a process may hold open.
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error
    try:
        start = os.fstat(file).st_size
        written = os.write(file, line)
        if written != len(line):
            # The kernel took what fitted; asking again says why the rest did not.
            written += os.write(file, line[written:])
        if written != len(line):
            raise OSError(0, "the file takes no more")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(file, start)
        raise ResourceError(
            f"cannot append to {path}: {error.strerror}; free some space, and the client's retry goes on"
        ) from error
    finally:
        os.close(file)


def _drop_torn_line(file: Any) -> bool:
    """Truncate a file behind its last newline; return whether the last line closes the session."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(_CLOSED)))
    end = file.read()
    if not end.endswith(b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        return False
    return bool(end == _CLOSED)


def _head(data: dict[str, Any], path: Path) -> SessionHead:
    if data.pop("format") != _FORMAT:
        raise ContractError(
            f"{path} is of another version of LongArc: restart with the one that wrote it, or give an empty "
            f"directory"
        )
    sampling = data.pop("sampling")
    for name in ("stop_ids", "stop_strings"):
        sampling[name] = tuple(sampling[name])
    budget = SessionBudget(**data.pop("budget"))
    return SessionHead(sampling=Sampling(**sampling), budget=budget, **data)
