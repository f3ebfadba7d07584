"""A trainer in a process of its own, so that sampling goes on while it computes.

::

    event loop --step(batch)--> one thread --pickle--> pipe --> child: trainer.step --> reply

* One request at a time: the thread serialises them, also across cancelled callers.
* The child ends with its parent: at the end of the pipe when idle, by a kernel signal when busy.
* The child's errors arrive as themselves; a dead child is a ResourceError that says how it died.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self, cast

import torch

from longarc.errors import ContractError, LongArcError, ResourceError, boundary
from longarc.records.batch import Batch, StepReport
from longarc.records.ports import Trainer
from longarc.records.sampling import WeightSource

_SHUTDOWN_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1


class ProcessTrainer:
    """Satisfies ``records.ports.Trainer``; the trainer itself lives in a child process."""

    def __init__(self, factory: Callable[[], Trainer], *, num_threads: int) -> None:
        """Start the child; use :meth:`start`, which also waits until it is ready.

        The child dies with the *thread* that calls this, which is what the kernel watches.
        """
        context = multiprocessing.get_context("spawn")  # fork would copy torch's locked thread pool
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(child_end, factory, num_threads, os.getpid()),
            name="longarc-trainer",
            daemon=True,
        )
        with boundary(ContractError, "cannot hand the trainer's factory to its process"):
            self._process.start()
        # Only the child may hold its end, or its death would not end the pipe.
        child_end.close()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer-pipe")
        self._requests: set[Future[object]] = set()
        """Requests without a reply yet; one whose caller was cancelled stays until the child answered."""

    @classmethod
    async def start(cls, factory: Callable[[], Trainer], *, num_threads: int) -> Self:
        """Start a child, let it build its trainer, and wait until it has.

        Args:
            factory: picklable; a ``functools.partial`` of a module-level function and plain arguments.
            num_threads: compute threads of the child.

        Raises:
            ContractError: the factory cannot be pickled.
            ResourceError: the child died.
            LongArcError: whatever the factory raised.
        """
        trainer = cls(factory, num_threads=num_threads)
        try:
            await trainer._ask(None)
        except BaseException:
            await trainer.close()
            raise
        return trainer

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return cast("int", self._process.pid)

    async def step(self, batch: Batch) -> StepReport:
        """Take one optimizer step in the child; the event loop stays free."""
        return cast("StepReport", await self._ask("step", batch))

    async def publish(self) -> WeightSource:
        """Write the current weights where engines can read them."""
        return cast("WeightSource", await self._ask("publish"))

    async def save(self, directory: str) -> None:
        """Write weights and optimizer state into an existing empty directory."""
        await self._ask("save", directory)

    async def close(self) -> None:
        """End the child: at once if it is busy, otherwise when it has read the end of the pipe."""
        if self._requests:
            self._process.kill()
        else:
            self._connection.close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._reap)
        self._connection.close()
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, method: str | None, *args: Any) -> object:
        """Send a request and wait for its reply; ``None`` only waits for the child to be ready."""
        request = self._thread.submit(self._exchange, method, args)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        return await asyncio.wrap_future(request)

    def _exchange(self, method: str | None, args: tuple[Any, ...]) -> object:
        try:
            if method is not None:
                self._connection.send((method, args))
            reply: object = self._connection.recv()
        except (EOFError, OSError) as error:
            self._reap()
            raise ResourceError(
                f"the trainer process (pid {self._process.pid}) ended with exit code "
                f"{self._process.exitcode}{_signal_name(self._process.exitcode)} during "
                f"{method or 'its start'}. If it was killed, look for a lack of memory; then resume the run"
            ) from error
        if isinstance(reply, LongArcError):
            raise reply
        return reply

    def _reap(self) -> None:
        self._process.join(_SHUTDOWN_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    return f" ({signal.Signals(-exit_code).name})"


def _serve(
    connection: Connection, factory: Callable[[], Trainer], num_threads: int, parent_pid: int
) -> None:
    """Run in the child: build the trainer, then answer requests until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _die_with(parent_pid)
    torch.set_num_threads(num_threads)
    with asyncio.Runner() as runner:
        try:
            with boundary(ContractError, "the trainer could not be built"):
                trainer = factory()
        except LongArcError as error:
            connection.send(_with_origin(error))
            return
        connection.send(None)
        while True:
            try:
                method, args = connection.recv()
            except EOFError:
                return
            try:
                with boundary(ContractError, f"the trainer failed in {method}"):
                    reply: object = runner.run(getattr(trainer, method)(*args))
            except LongArcError as error:
                reply = _with_origin(error)
            connection.send(reply)


def _with_origin(error: LongArcError) -> LongArcError:
    """Keep the child's traceback, which pickling would lose."""
    error.add_note("In the trainer process:\n" + "".join(traceback.format_exception(error)))
    return error


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent, however busy it is then."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the request was in place
        os._exit(1)
