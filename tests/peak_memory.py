"""How much memory something needs beyond what is there already, as the kernel counts it."""

import ctypes
import gc
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_M_MMAP_THRESHOLD = -3
"""Of glibc's ``mallopt``."""


def measured_alone(measure: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a module-level function in a new process, in which `peak_bytes` sees every block of 64 KiB.

    Where other tests have run, the allocator has holes that it fills without asking the kernel.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_return_freed_blocks) as alone:
        return alone.submit(measure, *args, **kwargs).result()


def peak_bytes(run: Callable[[], object]) -> int:
    """Return how far the resident memory of this process rises above its present state during ``run``."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free but kept would hide a rise
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _return_freed_blocks() -> None:
    ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
