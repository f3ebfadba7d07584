"""What every child process of a trainer does alike: start, die with its parent, and fail by name."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess

from longarc.errors import LongArcError, ResourceError
from longarc.models.threads import set_compute_threads

_PR_SET_PDEATHSIG = 1

SPAWN: SpawnContext = multiprocessing.get_context("spawn")
"""Children start empty: a fork would copy torch's locked thread pool."""


@contextlib.contextmanager
def ctrl_c_held() -> Iterator[None]:
    """Block SIGINT, so that a child started inside never sees it: Ctrl-C is the parent's to handle."""
    resource_tracker.ensure_running()  # otherwise the first start does, and unblocks SIGINT with that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def enter_child(parent_pid: int, *, num_threads: int) -> None:
    """Set up this process as a child: no Ctrl-C, an end with its parent, its compute threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # the kernel kills it with its parent, however busy it is then
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the request was in place
        os._exit(1)
    set_compute_threads(num_threads)


def with_origin(error: LongArcError, where: str) -> LongArcError:
    """Keep the child's traceback, which pickling would lose."""
    error.add_note(f"In {where}:\n" + "".join(traceback.format_exception(error)))
    return error


def death_of(process: BaseProcess, what: str, *, during: str) -> ResourceError:
    """Return the error that says how a child, which has been joined, ended."""
    exit_code = process.exitcode
    name = (
        f" ({signal.Signals(-exit_code).name})" if exit_code is not None and exit_code < 0 else ""
    )
    return ResourceError(
        f"{what} (pid {process.pid}) ended with exit code {exit_code}{name} during {during}. If it was "
        f"killed, look for a lack of memory; then resume the run"
    )
