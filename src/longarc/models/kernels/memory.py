"""Memory for tables that are read in random order all the time: weights and cache of the native decoder.

With pages of 4 KiB a decode step misses the processor's address cache for nearly every key it reads; huge
pages, where the system has them, made a step of ``longarc-nano`` a tenth shorter.
"""

import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 8 * HUGE_PAGE_BYTES


class Arena:
    """Hands out fp32 tensors of zeros; their memory lives as long as the arena or one of them does."""

    def __init__(self) -> None:
        self._chunks = [torch.empty(0)]
        self._used = 0

    def take(self, *shape: int) -> Tensor:
        """Return zeros of this shape, beginning at a cache line."""
        count = torch.Size(shape).numel()
        if self._used + count > len(self._chunks[-1]):
            self._chunks.append(_zeros(4 * count))
            self._used = 0
        taken = self._chunks[-1][self._used : self._used + count].view(shape)
        self._used += -(-count // 16) * 16
        return taken


def _zeros(num_bytes: int) -> Tensor:
    size = max(_CHUNK_BYTES, -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    # A mapping begins at a small page; the part in front of the first huge one is never touched.
    pages = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.float32)
    skipped = -whole.data_ptr() % HUGE_PAGE_BYTES // 4
    return whole[skipped : skipped + size // 4]
