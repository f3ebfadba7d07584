"""A GGUF file of llama.cpp: its settings by name, and its tensors dequantised one at a time.

The format, its quantisations included, is read by the ``gguf`` package (``pip install 'longarc[gguf]'``), which
nothing else here needs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from longarc.errors import CheckpointError, ConfigError, boundary

T = TypeVar("T")


class GgufFile:
    """A file that is mapped, not read whole."""

    def __init__(self, path: Path) -> None:
        """Look into a file.

        Raises:
            ConfigError: the ``gguf`` package is not installed.
            CheckpointError: the file is missing, truncated or of another format.
        """
        self.path = path
        open_reader, self._dequantize = _library()
        if not path.is_file():
            raise CheckpointError(f"there is no file {path}; give a model in GGUF format")
        with boundary(CheckpointError, f"{path} is not a whole GGUF file; copy it again"):
            reader = open_reader(path)
            self._fields: Mapping[str, Any] = dict(reader.fields)
            self._tensors: Mapping[str, Any] = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors and their shapes, outputs first as in PyTorch."""
        # GGUF names the dimension first that lies closest in memory.
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor in fp32, whatever it is stored in; a copy of its own."""
        tensor = self._tensors[name]
        kind = tensor.tensor_type
        with boundary(CheckpointError, f"tensor {name!r} of {self.path}, stored as {kind.name}"):
            numbers = self._dequantize(tensor.data, kind)
        return torch.tensor(numbers, dtype=torch.float32).view(self.shapes[name])

    def setting(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a setting.

        Raises:
            CheckpointError: the file does not have it and there is no default, or it is of another type.
        """
        if name not in self._fields:
            if default is None:
                raise CheckpointError(f"{self.path} has no setting {name!r}; it is no whole model")
            return default
        value = self._fields[name].contents()
        if kind is float and isinstance(value, float):
            # Stored in 32 bits; the shortest number that these mean is what was written once.
            value = float(f"{value:.7g}")
        if not isinstance(value, kind):
            raise CheckpointError(
                f"setting {name!r} of {self.path} is {value!r}, a {type(value).__name__}; it should be a "
                f"{kind.__name__}"
            )
        return value

    def has(self, name: str) -> bool:
        """Say whether the file has a setting."""
        return name in self._fields


def _library() -> tuple[Callable[[Path], Any], Callable[[Any, Any], Any]]:
    """Return what opens a file and what turns stored numbers into fp32."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ConfigError(
            f"models in GGUF format are read by the package gguf, which is not installed ({error}): "
            f"pip install 'longarc[gguf]'"
        ) from error
    return GGUFReader, dequantize
