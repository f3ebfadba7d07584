"""Tensors in memory that several processes map: what one writes in place, all see.

The memory is an unlinked file that lives as long as somebody maps it, so that a killed run leaves
nothing behind. It reaches a running process as a file descriptor over a socket.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

_ALIGNMENT_BYTES = 64
"""As torch allocates; products of the same numbers can round differently at another alignment."""


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the memory [bytes] that :func:`views` needs for tensors like these."""
    return sum(_padded(tensor) for tensor in tensors)


def new_file(size_bytes: int) -> int:
    """Return the file descriptor of ``size_bytes`` of new memory; the caller closes it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("longarc")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def map_file(descriptor: int) -> UInt8[Tensor, " bytes"]:
    """Map all of a file's memory; it stays mapped until the last view is gone."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def views(memory: UInt8[Tensor, " bytes"], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return places in ``memory`` with the shapes and types of ``tensors``, one behind the other."""
    places = []
    start = 0
    for tensor in tensors:
        used = memory[start : start + tensor.numel() * tensor.element_size()]
        places.append(used.view(tensor.dtype).view(tensor.shape))
        start += _padded(tensor)
    return places


def _padded(tensor: Tensor) -> int:
    blocks = -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES)
    return blocks * _ALIGNMENT_BYTES
