"""A trainer in a process of its own, so that sampling goes on while it computes.

::

    event loop --step(batch)--> one thread --pickle--> pipe --> child: trainer.step --> reply

* One request at a time: the thread serialises them, also across cancelled callers.
* The child ends with its parent: at the end of the pipe when idle, by a kernel signal when busy.
* The child's errors arrive as themselves; a dead child is a ResourceError that says how it died.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self, cast

from longarc.errors import ContractError, LongArcError, boundary
from longarc.records.batch import Batch, StepReport
from longarc.records.ports import Trainer
from longarc.records.sampling import WeightSource
from longarc.trainer.child import SPAWN, ctrl_c_held, death_of, enter_child, with_origin

_SHUTDOWN_TIMEOUT_S = 5.0


class ProcessTrainer:
    """Satisfies ``records.ports.Trainer``; the trainer itself lives in a child process."""

    def __init__(self, factory: Callable[[], Trainer], *, num_threads: int) -> None:
        """Start the child; use :meth:`start`, which also waits until it is ready.

        The child dies with the *thread* that calls this, which is what the kernel watches.
        """
        self._connection, child_end = SPAWN.Pipe()
        self._process = SPAWN.Process(
            target=_serve,
            args=(child_end, factory, num_threads, os.getpid()),
            name="longarc-trainer",
            daemon=True,
        )
        with (
            ctrl_c_held(),
            boundary(ContractError, "cannot hand the trainer's factory to its process"),
        ):
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
            during = method or "its start"
            raise death_of(self._process, "the trainer process", during=during) from error
        if isinstance(reply, LongArcError):
            raise reply
        return reply

    def _reap(self) -> None:
        self._process.join(_SHUTDOWN_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    connection: Connection, factory: Callable[[], Trainer], num_threads: int, parent_pid: int
) -> None:
    """Run in the child: build the trainer, then answer requests until the pipe ends."""
    enter_child(parent_pid, num_threads=num_threads)
    with asyncio.Runner() as runner:
        try:
            with boundary(ContractError, "the trainer could not be built"):
                trainer = factory()
        except LongArcError as error:
            connection.send(with_origin(error, "the trainer process"))
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
                reply = with_origin(error, "the trainer process")
            connection.send(reply)
