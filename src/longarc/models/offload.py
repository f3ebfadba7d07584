"""Activations of layers in a file, read back one layer ahead of backward.

::

    forward   layer i computes ........ layer i+1 computes ......
    thread                     write i ......... write i+1          memory: the layer that computes, and
    backward  layer i+1 ............... layer i .................           the one before it on its way
    thread    read i ................. read i-1

What autograd saves for a layer is taken over storage by storage, however many operations saved views
of it. Parameters stay where they are, and so does what is small.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from longarc.errors import ContractError, ResourceError, boundary

MIN_BYTES = 1 << 14
"""Smaller storages stay in memory [bytes]; reading one back would take longer than it is worth."""

MOUNTS = Path("/proc/self/mountinfo")
"""Which file system has which device number; elsewhere than on Linux there is no such file."""


class OffloadFile:
    """A file without a name, the thread that writes and reads it, and the layers of one pass in it.

    The thread takes requests in order, so nothing is read before it is written.
    """

    def __init__(self, directory: str | None) -> None:
        """Open the file, which goes with the process however that ends.

        Raises:
            ResourceError: the directory does not exist, is not writable, or lies in memory.
        """
        self._directory = directory or tempfile.gettempdir()
        self._file = _opened_file(self._directory)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        self._size_bytes = 0
        self._newest: _OffloadedLayer | None = None
        self._read_last: _OffloadedLayer | None = None
        self._is_closed = False
        self.num_passes = 0
        """Passes begun; what belongs to an earlier one is gone."""

    def restart(self) -> None:
        """Forget the pass before: reads that nothing waited for, and what could not be written, included."""
        # Requests are taken in order, so this one ends when no other uses the file any more.
        self._thread.submit(int).result()
        self._newest = self._read_last = None
        self._size_bytes = 0
        self.num_passes += 1
        self._file.truncate(0)

    def close(self) -> None:
        """End the thread and free the disk; no backward can run afterwards."""
        self._is_closed = True
        self._thread.shutdown()
        self._newest = self._read_last = None
        self._file.close()

    @contextmanager
    def offloaded(self, layer: nn.Module) -> Iterator[None]:
        """Offload what the operations inside save for backward.

        Raises:
            ResourceError: what an earlier layer saved could not be written.
        """
        stash = _OffloadedLayer(self, before=self._newest)
        own = {tensor.untyped_storage().data_ptr() for tensor in layer.parameters()}

        def pack(tensor: Tensor) -> "Tensor | _Place":
            storage = tensor.untyped_storage()
            if storage.nbytes() < MIN_BYTES or storage.data_ptr() in own:
                return tensor.detach()  # a saved output that held itself would never be freed
            return stash.add(tensor)

        with saved_tensors_hooks(pack, _unpacked):
            yield
        # One layer on its way at a time: a disk slower than the model must not fill the memory.
        self._await_writing()
        stash.write()
        self._newest = stash

    def reserve(self, num_bytes: int) -> int:
        """Return where in the file there is room."""
        offset = self._size_bytes
        self._size_bytes += num_bytes
        return offset

    def turn_to(self, stash: "_OffloadedLayer") -> None:
        """Read a layer and the one before it, unless that is under way; forget the one that was read last."""
        if self._read_last is stash:
            return
        if self._read_last is not None:
            self._read_last.forget()
        self._read_last = stash
        stash.read()
        if stash.before is not None:
            stash.before.read()

    def submit(
        self, transfer: Callable[[int, list["_Chunk"], str], list[Tensor]], chunks: list["_Chunk"]
    ) -> "Future[list[Tensor]]":
        """Let the thread write or read.

        Raises:
            ContractError: the file is closed.
        """
        if self._is_closed:
            raise ContractError(
                "backward needs activations that were offloaded, but their file is closed; run backward "
                "inside the `with Activations(...)` of its forward"
            )
        return self._thread.submit(transfer, self._file.fileno(), chunks, self._directory)

    def _await_writing(self) -> None:
        if self._newest is not None:
            self._newest.await_writing()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A storage and where in the file it goes."""

    offset: int
    num_bytes: int
    source: Tensor | None
    """Shares the storage; None when it is to be read."""
    version: int
    """Of ``source`` when it was saved; in-place operations count it up."""


class _OffloadedLayer:
    """What one layer saved, in memory or in the file."""

    def __init__(self, file: OffloadFile, *, before: "_OffloadedLayer | None") -> None:
        self.before = before
        """The layer whose backward comes after this one's."""
        self._file = file
        self._pass = file.num_passes
        self._chunks: list[_Chunk] = []
        self._index_of: dict[int, int] = {}
        self._writing: Future[list[Tensor]] | None = None
        self._reading: Future[list[Tensor]] | None = None

    def add(self, tensor: Tensor) -> "_Place":
        """Take over a tensor; it stays in memory until `write`, so an address means one storage."""
        storage = tensor.untyped_storage()
        index = self._index_of.setdefault(storage.data_ptr(), len(self._chunks))
        if index == len(self._chunks):
            offset = self._file.reserve(storage.nbytes())
            self._chunks.append(_Chunk(offset, storage.nbytes(), tensor.detach(), tensor._version))
        return _Place(
            self, index, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )

    def write(self) -> None:
        """Start writing; the memory goes when that is done, and nothing else holds it."""
        self._writing = self._file.submit(_write, self._chunks)
        self._chunks = [_Chunk(c.offset, c.num_bytes, None, 0) for c in self._chunks]
        self._index_of.clear()

    def await_writing(self) -> None:
        """Wait until everything is in the file.

        Raises:
            ResourceError: it could not be written.
            ContractError: it was changed in place after it was saved.
        """
        if self._writing is not None:
            self._writing.result()

    def read(self) -> None:
        """Start reading, unless that was done."""
        if self._reading is None:
            self._reading = self._file.submit(_read, self._chunks)

    def forget(self) -> None:
        """Free the memory; tensors in use keep theirs."""
        self._reading = None

    def storage(self, index: int) -> torch.UntypedStorage:
        """Return a storage, from the file.

        Raises:
            ContractError: the file was used for another pass since.
        """
        if self._pass != self._file.num_passes:
            raise ContractError(
                "backward needs activations of a forward before the last one, which were forgotten; run "
                "the backward of each forward before the next forward"
            )
        self.await_writing()
        self._file.turn_to(self)
        assert self._reading is not None
        return self._reading.result()[index].untyped_storage()


@dataclass(frozen=True, slots=True)
class _Place:
    """What autograd keeps instead of a tensor."""

    layer: _OffloadedLayer
    index: int
    dtype: torch.dtype
    storage_offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def check_directory(directory: str | None) -> None:
    """Refuse a directory that could not take, or should not take, offloaded activations.

    Args:
        directory: exists; None is the system's temporary one.

    Raises:
        ResourceError: it does not exist, is not writable, or lies in memory.
    """
    _opened_file(directory or tempfile.gettempdir()).close()


def _opened_file(directory: str) -> IO[bytes]:
    """Open a file without a name on a disk."""
    setting = "set activations.offload_directory to a directory on a disk"
    with boundary(ResourceError, f"cannot offload activations to {directory}; {setting}"):
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
    kind = _kind_in_memory(os.fstat(file.fileno()).st_dev)
    if kind is not None:
        file.close()
        raise ResourceError(
            f"cannot offload activations to {directory}: it is a {kind}, whose files lie in the memory that "
            f"offloading is to free; {setting}"
        )
    return file


def _kind_in_memory(device: int) -> str | None:
    """Return which file system in memory has a device number; None where it is on a disk, or unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for mount in mounts:
        place, _, source = mount.partition(" - ")
        kind = source.split(" ", 1)[0]
        if place.split(" ", 3)[2] == number and kind in ("tmpfs", "ramfs"):
            return kind
    return None


def _unpacked(saved: Tensor | _Place) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    storage = saved.layer.storage(saved.index)
    empty = torch.empty(0, dtype=saved.dtype)
    return empty.set_(storage, saved.storage_offset, saved.shape, saved.stride)


def _write(file: int, chunks: list[_Chunk], where: str) -> list[Tensor]:
    for chunk in chunks:
        assert chunk.source is not None
        content = _view(torch.empty(0, dtype=torch.uint8).set_(chunk.source.untyped_storage()))
        done = 0
        with boundary(ResourceError, f"cannot offload {chunk.num_bytes} bytes to {where}"):
            while done < chunk.num_bytes:  # the kernel moves at most 2 GiB at once
                done += os.pwrite(file, content[done:], chunk.offset + done)
        if chunk.source._version != chunk.version:
            raise ContractError(
                f"a tensor of shape {list(chunk.source.shape)} was changed in place after it had been "
                f"saved for backward; its gradient would be wrong. Change a copy"
            )
    return []


def _read(file: int, chunks: list[_Chunk], where: str) -> list[Tensor]:
    loaded = []
    for chunk in chunks:
        buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8)
        content = _view(buffer)
        done = 0
        with boundary(ResourceError, f"cannot read offloaded activations from {where}"):
            while done < chunk.num_bytes:
                num_bytes = os.preadv(file, [content[done:]], chunk.offset + done)
                if num_bytes == 0:
                    raise EOFError(f"the file ends {chunk.num_bytes - done} bytes too early")
                done += num_bytes
        loaded.append(buffer)
    return loaded


def _view(content: Tensor) -> memoryview:
    return content.numpy().data
