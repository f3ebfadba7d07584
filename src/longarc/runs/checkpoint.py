"""Checkpoints on disk: whole or absent, and provably what they were when written.

::

    checkpoints/.tmp-step-000123   filled by a callback, hashed, synced
                 | rename (atomic)
    checkpoints/step-000123/       weights.safetensors ... manifest.json
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field, ValidationError

from longarc.config.settings import Settings, problems_of
from longarc.errors import CheckpointError, ResourceError
from longarc.runs.files import json_document, make_directory, sync_directory

MANIFEST = "manifest.json"
"""Name of the file that describes a checkpoint; written last."""

MANIFEST_VERSION = 1
"""Version of the manifest's fields."""

_TEMPORARY = ".tmp-"


class FileEntry(Settings):
    """One file of a checkpoint."""

    size_bytes: int = Field(ge=0)
    """Length [bytes]."""
    sha256: str
    """Digest of its bytes."""


class Manifest(Settings):
    """What a checkpoint is and what belongs to it."""

    schema_version: Literal[1] = 1
    """Version of these fields."""
    kind: str
    """What it can be loaded into: policy, critic, reward_model."""
    stage: str
    """Stage that wrote it."""
    step: int = Field(ge=0)
    """Optimizer steps of that stage that are in it [optimizer steps]."""
    policy_version: int = Field(ge=0)
    """Version of the weights [optimizer steps]."""
    model: dict[str, Any]
    """Configuration of the model."""
    tokenizer_sha256: str | None
    """Digest of the tokenizer's file; None where the tokens are the user's own."""
    created_at_s: float
    """Wall clock [seconds since the epoch]."""
    info: dict[str, Any] = Field(default_factory=dict)
    """Facts for the stages that follow (tokens seen, RoPE base, ...)."""
    files: dict[str, FileEntry]
    """Every other file by relative path."""


class CheckpointWriter:
    """Writes the checkpoints of one stage. One process at a time: the run directory is locked."""

    def __init__(
        self, directory: Path, *, keep_last: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Prepare a directory of checkpoints, and remove what a crash left half-written.

        Args:
            directory: where ``step-000123`` goes.
            keep_last: how many are kept, at least 1; the stage's final one is kept in any case.
            clock: wall clock [seconds since the epoch].
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last={keep_last}: keep at least 1 checkpoint")
        self._directory = directory
        self._keep_last = keep_last
        self._clock = clock
        make_directory(directory)
        for leftover in directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)

    @contextmanager
    def open(
        self,
        *,
        kind: str,
        stage: str,
        step: int,
        policy_version: int,
        model: Mapping[str, Any],
        tokenizer_sha256: str | None,
        info: Mapping[str, Any] | None = None,
    ) -> Iterator[Path]:
        """Give the body an empty directory to fill; it becomes the checkpoint when the body ends.

        Usable around ``await``. If the body raises, nothing stays. Older checkpoints beyond
        ``keep_last`` are removed afterwards.

        Raises:
            CheckpointError: an intact checkpoint of this step exists, or the body wrote nothing.
            ResourceError: the disk is full or fails.
        """
        target = self._directory / checkpoint_name(step)
        self._check_free(target)
        staging = self._directory / f"{_TEMPORARY}{target.name}"
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            yield staging
            manifest = Manifest(
                kind=kind,
                stage=stage,
                step=step,
                policy_version=policy_version,
                model=dict(model),
                tokenizer_sha256=tokenizer_sha256,
                created_at_s=self._clock(),
                info=dict(info or {}),
                files=_entries(staging),
            )
            (staging / MANIFEST).write_bytes(json_document(manifest.model_dump(mode="json")))
            _sync_tree(staging)
            os.rename(staging, target)
            sync_directory(self._directory)
        except OSError as error:
            raise ResourceError(
                f"cannot write checkpoint {target}: {error.strerror or error}. Nothing was "
                "half-written: free some space and resume the run."
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._prune()

    def write(
        self,
        fill: Callable[[Path], None],
        *,
        kind: str,
        stage: str,
        step: int,
        policy_version: int,
        model: Mapping[str, Any],
        tokenizer_sha256: str | None,
        info: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write one checkpoint with a callback that fills a directory; return where it is."""
        with self.open(
            kind=kind,
            stage=stage,
            step=step,
            policy_version=policy_version,
            model=model,
            tokenizer_sha256=tokenizer_sha256,
            info=info,
        ) as staging:
            fill(staging)
        return self.path(step)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        return self._directory / checkpoint_name(step)

    def _check_free(self, target: Path) -> None:
        if not target.exists():
            return
        try:
            verify(target)
        except CheckpointError:
            # Damaged by a loss of power: the run resumed before it and has reached it again.
            shutil.rmtree(target)
            return
        raise CheckpointError(
            f"checkpoint {target} exists: a step is written once. Resume from it, or use a new run directory."
        )

    def _prune(self) -> None:
        final = read_final(self._directory.parent)
        for old in list_checkpoints(self._directory)[: -self._keep_last]:
            if old != final:
                shutil.rmtree(old)


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step-{step:06d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a stage, oldest first; empty where there are none."""
    found = [path for path in directory.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


FINAL = "final.json"
"""Name of the file in a stage's directory that points at the checkpoint the next stage starts from."""


def read_final(stage_directory: Path) -> Path | None:
    """Return the checkpoint a finished stage points at, or None.

    Raises:
        CheckpointError: the pointer is damaged.
    """
    pointer = stage_directory / FINAL
    if not pointer.exists():
        return None
    try:
        name = orjson.loads(pointer.read_bytes())["checkpoint"]
        return stage_directory / "checkpoints" / str(name)
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{pointer} is damaged ({error}): remove it and resume the stage"
        ) from error


def read_manifest(directory: Path) -> Manifest:
    """Read what a checkpoint is, without looking at its files.

    Raises:
        CheckpointError: it is missing, damaged or of a newer version.
    """
    path = directory / MANIFEST
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} is not a checkpoint: it has no {MANIFEST}. Point at a directory like "
            "stages/NAME/checkpoints/step-000123"
        ) from error
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Use an older checkpoint."
        ) from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != MANIFEST_VERSION:
        raise CheckpointError(
            f"{path} has schema version {version}, this LongArc reads {MANIFEST_VERSION}: install "
            "the LongArc that wrote it"
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is damaged: {problems_of(error)}. Use an older checkpoint."
        ) from error


def verify(directory: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest, and return that.

    Raises:
        CheckpointError: a file is missing, or its size or digest differs.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(
                f"checkpoint {directory}: {name} is missing, expected {entry.size_bytes} bytes. "
                "Use an older checkpoint."
            )
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise CheckpointError(
                f"checkpoint {directory}: {name} has {size} bytes, expected {entry.size_bytes}: "
                "it is truncated or was replaced. Use an older checkpoint."
            )
        digest = file_sha256(path)
        if digest != entry.sha256:
            raise CheckpointError(
                f"checkpoint {directory}: {name} has sha256 {digest}, expected {entry.sha256}: "
                "its bytes have changed. Use an older checkpoint."
            )
    return manifest


def file_sha256(path: Path) -> str:
    """Return the digest of a file's bytes.

    Raises:
        OSError: it cannot be read, or is a pipe or device, which need never end.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries(directory: Path) -> dict[str, FileEntry]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    if not files:
        raise CheckpointError(f"nothing was written into checkpoint {directory}")
    return {
        path.relative_to(directory).as_posix(): FileEntry(
            size_bytes=path.stat().st_size, sha256=file_sha256(path)
        )
        for path in files
    }


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
