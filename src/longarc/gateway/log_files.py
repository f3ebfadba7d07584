"""The turn logs of a gateway that has no ledger: a file per session, which only grows.

::

    "LATL" 0x01 | record: facts of the opening | record: turn 0 | record: turn 1 | ...
    record = u32 length | u32 crc32 of the payload | payload          (little-endian)

A record that a death cut off is the file's end: nobody was told of that turn, so it is dropped when the
directory is read. Damage anywhere before it is an error.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from longarc.errors import ContractError, boundary
from longarc.runs.disk import writing
from longarc.runs.files import make_directory

_MAGIC: Final = b"LATL\x01"
_HEAD: Final = struct.Struct("<II")
_SUFFIX: Final = ".turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSession:
    """One session as its file tells it."""

    session_id: str
    facts: Mapping[str, Any]
    """What ``open`` was given."""
    payloads: tuple[bytes, ...]
    """Turn payloads, for ``Gateway.restore``."""


class TurnLogFiles:
    """Logs every session of a gateway below one directory; the object itself is a ``TurnLog``."""

    def __init__(self, directory: Path, *, syncs: bool = False) -> None:
        """Make the directory.

        Args:
            directory: where the files are; one gateway at a time may use it.
            syncs: whether a turn has reached the disk itself when it is told. Without, it survives the death of
                the process but not a loss of power.

        Raises:
            ResourceError: it cannot be made.
        """
        make_directory(directory)
        self._directory = directory
        self._syncs = syncs

    def open(self, session_id: str, facts: Mapping[str, Any]) -> None:
        """Begin the log of a session that has none.

        Args:
            session_id: its id.
            facts: JSON that a restart needs to open the session again.

        Raises:
            ContractError: there is one.
            ResourceError: the disk is full, or the place cannot be written.
        """
        path = self._path(session_id)
        if path.exists():
            raise ContractError(f"session {session_id!r} has a turn log already: {path}")
        opening = orjson.dumps({"session_id": session_id, "facts": dict(facts)})
        self._append(path, _MAGIC + _record(opening))

    def __call__(self, session_id: str, index: int, payload: bytes) -> None:
        """Append a turn; see ``TurnLog``.

        Raises:
            ResourceError: the disk is full, or the place cannot be written; the file is as it was.
        """
        path = self._path(session_id)
        if index == 0 and not path.exists():
            self.open(session_id, {})
        self._append(path, _record(payload))

    def sessions(self) -> Iterator[LoggedSession]:
        """Yield the sessions that have a log, in the order of their file names; torn ends are cut off.

        Raises:
            ContractError: a file is damaged.
        """
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            data = path.read_bytes()
            records, length = _records(path, data)
            if length < len(data):
                os.truncate(path, length)
            if not records:
                path.unlink()
                continue
            with boundary(ContractError, f"reading the turn log {path}"):
                opening = orjson.loads(records[0])
                yield LoggedSession(
                    session_id=opening["session_id"],
                    facts=opening["facts"],
                    payloads=tuple(records[1:]),
                )

    def remove(self, session_id: str) -> None:
        """Delete the log of a session that is recorded elsewhere; one that is not there is fine."""
        self._path(session_id).unlink(missing_ok=True)

    def _path(self, session_id: str) -> Path:
        # Ids come from clients, names of files must not.
        name = hashlib.blake2b(session_id.encode("utf-8", "surrogatepass"), digest_size=16)
        return self._directory / f"{name.hexdigest()}{_SUFFIX}"

    def _append(self, path: Path, data: bytes) -> None:
        with writing(path, len(data)), _opened(path) as (descriptor, length):
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                if self._syncs:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, length)
                raise


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _record(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _records(path: Path, data: bytes) -> tuple[list[bytes], int]:
    """Return the whole records of a file, and how long they are with what stands before them."""
    if not data.startswith(_MAGIC):
        if _MAGIC.startswith(data):
            return [], 0
        raise ContractError(
            f"{path} is no turn log of this version: it begins with {data[:5]!r}, not {_MAGIC!r}"
        )
    records: list[bytes] = []
    at = len(_MAGIC)
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length:
            break
        if zlib.crc32(payload) != checksum:
            raise ContractError(
                f"{path} is damaged at byte {at}: record {len(records)} has not the checksum it was "
                f"written with. Restore the file, or move it away to start without the session"
            )
        records.append(payload)
        at += _HEAD.size + length
    return records, at if records else 0
