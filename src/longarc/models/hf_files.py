"""Safetensors files, one or many: which tensors they hold, and reading and writing them one at a time.

No second copy of a model is ever in memory: what is read is mapped, copied and unmapped again, what is
written goes out from where it lies, shard by shard.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longarc.errors import CheckpointError
from longarc.runs.disk import writing

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
"""Files of a model; others in its directory, such as an adapter's, are somebody else's."""
MAX_SHARD_BYTES = 5_000_000_000
"""Of one file, as Hugging Face writes them [bytes]; a single larger tensor has a file of its own."""
MAPPED_BYTES = 1 << 26
"""What may be read before a file is mapped anew; pages that were read count as memory until then [bytes]."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file describes it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: F32, BF16, F8_E4M3, I32, ..."""


class TensorFiles:
    """The tensors of one or several files by name; a context manager."""

    def __init__(self, tensors: Mapping[str, StoredTensor], where: Path) -> None:
        self.tensors = tensors
        self.where = where
        """The file or the directory, for messages."""
        self._opened: tuple[Path, Any] | None = None
        self._num_read_bytes = 0

    @classmethod
    def of_file(cls, path: Path) -> "TensorFiles":
        """Look into one file.

        Raises:
            CheckpointError: it is missing or truncated.
        """
        return cls(_stored(path), path)

    @classmethod
    def of_directory(cls, directory: Path) -> "TensorFiles":
        """Look into the files that an index names, or without one into those named like a model's.

        Where none is, into all there are.

        Raises:
            CheckpointError: there are none, one is missing or truncated, or index and files disagree.
        """
        if (directory / INDEX_FILE).is_file():
            return cls(_indexed(directory), directory)
        there = sorted(directory.glob("*.safetensors"))
        paths = [path for path in there if _WEIGHTS.fullmatch(path.name)] or there
        if not paths:
            raise CheckpointError(
                f"{directory} holds no *.safetensors file; convert the weights to safetensors first"
            )
        tensors: dict[str, StoredTensor] = {}
        for path in paths:
            for name, stored in _stored(path).items():
                if name in tensors:
                    raise CheckpointError(
                        f"tensor {name!r} is in {tensors[name].path.name} and in {path.name} of "
                        f"{directory}; remove the file that does not belong there, or add {INDEX_FILE}"
                    )
                tensors[name] = stored
        return cls(tensors, directory)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or one slice along its first dimension; drop it before the next one is read."""
        stored = self.tensors[name]
        if self._opened is None or self._opened[0] != stored.path or self._is_worn():
            self.close()
            opening: AbstractContextManager[Any] = safe_open(stored.path, framework="pt")
            self._opened = (stored.path, opening.__enter__())
        opened = self._opened[1]
        tensor: Tensor = opened.get_tensor(name) if index is None else opened.get_slice(name)[index]
        self._num_read_bytes += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Unmap the file that was read last."""
        if self._opened is not None:
            self._opened[1].__exit__(None, None, None)
        self._opened = None
        self._num_read_bytes = 0

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_worn(self) -> bool:
        return self._num_read_bytes > MAPPED_BYTES


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written."""

    name: str
    num_bytes: int
    tensor: Callable[[], Tensor]
    """Gives it when its shard is written: a view of the model, or something computed only then."""


def write_file(tensors: Sequence[Outgoing], path: Path) -> None:
    """Write tensors to one file, which appears whole or not at all.

    Raises:
        OSError: of the file system, for who knows what the file is a part of.
    """
    partial = _partial(path)
    try:
        _write(tensors, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_directory(
    tensors: Sequence[Outgoing],
    config: Mapping[str, Any],
    directory: Path,
    *,
    max_shard_bytes: int,
) -> None:
    """Write ``config.json`` and ``model.safetensors``, or shards and an index where that would be too large.

    A model that was there before is replaced, and nothing of it is left. Until the new one is complete, it stays as
    it is; after that there is no ``config.json`` until the new one goes with the new weights. So whenever
    writing ends, the directory holds one of the two models, or none that can be loaded.

    Args:
        tensors: in the order in which they are written.
        config: content of ``config.json``.
        directory: exists.
        max_shard_bytes: of one file; a single larger tensor has a file of its own.

    Raises:
        ResourceError: there is too little room, or the directory cannot be written to.
    """
    shards = _shards(tensors, max_shard_bytes)
    files = {_shard_name(number, len(shards)): shard for number, shard in enumerate(shards, 1)}
    texts: dict[str, Mapping[str, Any]] = {}
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    if len(shards) > 1:
        place = {tensor.name: name for name, shard in files.items() for tensor in shard}
        texts[INDEX_FILE] = {
            "metadata": {"total_size": num_bytes},
            "weight_map": dict(sorted(place.items())),
        }
    texts[CONFIG_FILE] = config
    with writing(directory, num_bytes):
        _write_all(files, texts, directory)


def _write_all(
    files: Mapping[str, Sequence[Outgoing]], texts: Mapping[str, Mapping[str, Any]], directory: Path
) -> None:
    names = [*files, *texts]
    try:
        for name, shard in files.items():
            _write(shard, _partial(directory / name))
        for name, content in texts.items():
            _partial(directory / name).write_text(json.dumps(content, indent=2) + "\n")
        _remove_model(directory)
        for name in names:  # the config at last
            os.replace(_partial(directory / name), directory / name)
    finally:
        for name in names:
            _partial(directory / name).unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    """Return where a file is written before it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _write(tensors: Sequence[Outgoing], path: Path) -> None:
    content = {tensor.name: tensor.tensor().contiguous() for tensor in tensors}
    try:
        save_file(content, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors spells the system's error out instead of raising it.
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def _remove_model(directory: Path) -> None:
    """Remove the config first: what is left when this is cut short cannot be loaded."""
    for name in (CONFIG_FILE, INDEX_FILE):
        (directory / name).unlink(missing_ok=True)
    for path in directory.iterdir():
        if _WEIGHTS.fullmatch(path.name):
            path.unlink()


def _shard_name(number: int, num_shards: int) -> str:
    return (
        WEIGHTS_FILE if num_shards == 1 else f"model-{number:05d}-of-{num_shards:05d}.safetensors"
    )


def _shards(tensors: Sequence[Outgoing], max_shard_bytes: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if shards[-1] and num_bytes + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(tensor)
        num_bytes += tensor.num_bytes
    return shards


def _indexed(directory: Path) -> dict[str, StoredTensor]:
    try:
        place = json.loads((directory / INDEX_FILE).read_bytes())["weight_map"]
        names = sorted(set(place.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{directory / INDEX_FILE} has no weight_map from tensors to files: {error!r}; copy it again"
        ) from error
    for name in names:
        # Checked, because an index comes from elsewhere and could name any file of this machine.
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointError(
                f"{INDEX_FILE} names {name!r}, which is no file of {directory}; a shard lies beside its index"
            )
    held = {name: _stored(directory / name) for name in names}
    for tensor, name in place.items():
        if tensor not in held[name]:
            raise CheckpointError(
                f"{INDEX_FILE} says that {name} holds {tensor!r}, but it does not; copy both again from "
                f"where {directory} comes from"
            )
    return {tensor: held[name][tensor] for tensor, name in place.items()}


def _stored(path: Path) -> dict[str, StoredTensor]:
    """Read names, shapes and dtypes; also proves that the file is as long as its header says."""
    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(path, tuple(part.get_shape()), str(part.get_dtype()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"weights file {path} cannot be read: {error}. It is missing, truncated or not a "
            f"safetensors file; copy it again, or resume from an earlier checkpoint"
        ) from error
