"""A server of somebody else's as a child process: started, waited for, and never left behind.

A guard, which only waits for the end of a pipe, stops the server where LongArc itself is killed.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from longarc.errors import EngineError

_LOG_LINES = 15
"""Of the server's log, in an error."""
_LOOK_EVERY_S = 0.5
"""Between two questions whether a starting server answers: it has no other way to tell."""
_STOP_S = 20.0
"""Until a server that was asked to stop is killed."""
_GUARD = """
import os, signal, sys, time
sys.stdin.buffer.read()
for number in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.killpg(int(sys.argv[1]), number)
    except ProcessLookupError:
        break
    time.sleep(10)
"""
"""Ends with LongArc's end of the pipe, however that came to be closed."""


class ServerProcess:
    """One running server with all its own children (a process group)."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        guard: asyncio.subprocess.Process,
        name: str,
        log: Path,
    ) -> None:
        self._process, self._guard, self._name, self._log = process, guard, name, log

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        log: Path,
        is_up: Callable[[], Awaitable[bool]],
        timeout_s: float,
    ) -> "ServerProcess":
        """Start a server and wait until it answers.

        Args:
            argv: its command line; the first word is its interpreter.
            name: what errors call it.
            environment: variables beside those of this process.
            log: where its output goes.
            is_up: asks it.
            timeout_s: how long that may take [seconds].

        Raises:
            EngineError: it cannot be started, ended, or does not answer in time; with the end of its log.
        """
        try:
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    env=_without_ours(os.environ) | dict(environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    # A group of its own: its workers are stopped with it, and Ctrl-C is ours to handle.
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(
                f"{name} cannot be started with {argv[0]}: {error}; engine.python has to be the interpreter "
                f"of an environment that has it"
            ) from error
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", _GUARD, str(process.pid)),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        server = cls(process, guard, name, log)
        try:
            await server._wait(is_up, timeout_s)
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def failure(self) -> str | None:
        """Why it does not run any more, with the end of its log; None while it does."""
        code = self._process.returncode
        return (
            None if code is None else f"{self._name} ended with status {code}{self._end_of_log()}"
        )

    async def close(self) -> None:
        """Stop it with its children: asked first, then killed."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        # Also where it ended by itself: its workers may not have.
        self._signal(signal.SIGKILL)
        await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._guard.kill()
        await self._guard.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def _wait(self, is_up: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await is_up():
                    if self.failure is not None:
                        raise EngineError(self.failure)
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            raise EngineError(
                f"{self._name} does not answer after {timeout_s:g} s; raise engine.start_timeout_s"
                f"{self._end_of_log()}"
            ) from None

    def _end_of_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        shown = [line for line in lines if line.strip()][-_LOG_LINES:]
        return f". The end of {self._log}:\n" + "\n".join(shown)


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop what would put this environment's packages into the server's."""
    return {
        key: value
        for key, value in environment.items()
        if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
