"""Hands weights to engines: one file per version, complete or absent."""

import hashlib
import os
from pathlib import Path

from longarc.errors import ResourceError, boundary
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import save_weights
from longarc.records.sampling import WeightSource

NUM_KEPT = 2
"""Files kept by one publisher: the newest, and the one before it, which an engine may still be reading."""


class WeightPublisher:
    """Writes weight files into one directory and removes those that nobody can need."""

    def __init__(self, directory: str) -> None:
        """Publish into ``directory``.

        Raises:
            ResourceError: it does not exist.
        """
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise ResourceError(
                f"publish directory {directory} does not exist; create it before the trainer starts"
            )
        self._published: list[Path] = []

    def publish(self, model: Decoder, policy_version: int) -> WeightSource:
        """Write the weights under a temporary name, flush, rename; a reader never sees half a file.

        Raises:
            ResourceError: the disk is full or not writable.
        """
        path = self._directory / f"weights-{policy_version:08d}.safetensors"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        doing = f"cannot publish weights to {path}; free disk space or fix the permission"
        try:
            with boundary(ResourceError, doing):
                save_weights(model, str(temporary))
                with temporary.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    os.fsync(file.fileno())
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        self._retire(path)
        return WeightSource(path=str(path), sha256=digest)

    def _retire(self, newest: Path) -> None:
        self._published = [path for path in self._published if path != newest] + [newest]
        while len(self._published) > NUM_KEPT:
            self._published.pop(0).unlink(missing_ok=True)
