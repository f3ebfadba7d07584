"""One running box, seen from the host.

::

    exec/read/write/listen --frame--> socketpair --> execd (process 1 of the box)
                           <--frame--
    close: kills execd; the kernel ends the rest of the box; the pidfd of execd becomes readable;
           both bwraps follow and are reaped

No thread belongs to a box: sockets and pidfds are watched by the event loop. One request at a
time; a request that was cancelled half-way leaves the conversation out of step, so it ends the box.
"""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Literal

from longarc.envs.sandbox.connection import Connection
from longarc.envs.sandbox.spawn import Spawned
from longarc.envs.sandbox.wire import pack, unpack
from longarc.errors import SandboxError
from longarc.records.ports import ExecResult

REPLY_GRACE_S = 30.0
"""Time beyond a command's own deadline after which a silent exec server counts as dead [seconds]."""
CLOSE_GRACE_S = 10.0
"""Time a box has to end before its bwrap is killed [seconds]."""
MAX_TRANSFER_BYTES = 16 << 20
"""Largest file read or written, and largest standard input."""


class Vessel:
    """The processes and the connection of a box; may serve several boxes one after the other."""

    def __init__(self, spawned: Spawned) -> None:
        self.process = spawned.process
        self.connection = Connection(spawned.connection)
        self.server_pid: int | None = None
        """Process id of the exec server, as the host counts; known once it has answered."""
        self._server_fd: int | None = None

    def started(self, server_pid: int) -> None:
        """Note which process ends last: the kernel reports process 1 only after all others ended."""
        self.server_pid = server_pid
        self._server_fd = os.pidfd_open(server_pid)

    def kill(self) -> None:
        """Kill the exec server, and with it the box; one that still starts finds a closed socket."""
        self.connection.shut_down()
        if self._server_fd is not None:
            try:
                signal.pidfd_send_signal(self._server_fd, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def end(self) -> None:
        """Kill, and wait until every process is gone and reaped; the socket stays open."""
        self.kill()
        if self._server_fd is not None:
            await _readable(self._server_fd, CLOSE_GRACE_S)
            os.close(self._server_fd)
            self._server_fd = None
        if self.process.poll() is None:  # both bwraps follow the exec server by themselves
            fd = os.pidfd_open(self.process.pid)
            try:
                if not await _readable(fd, CLOSE_GRACE_S):
                    self.process.kill()
                    await _readable(fd, CLOSE_GRACE_S)
            finally:
                os.close(fd)
        self.process.wait()


class BwrapSandbox:
    """A box of ``BwrapBackend``; satisfies ``records.ports.Sandbox``.

    ``read`` and ``write`` raise the ``OSError`` of the box (no such file, no space left, ...),
    which is the agent's doing, and ``SandboxError`` where the box is lost, which is not.
    """

    def __init__(
        self,
        *,
        box_id: str,
        vessel: Vessel,
        output_bytes: int,
        may_keep: Callable[["BwrapSandbox"], bool],
        on_closed: Callable[["BwrapSandbox", bool], None],
    ) -> None:
        self.id = box_id
        self.vessel = vessel
        self._connection = vessel.connection
        self._output_bytes = output_bytes
        self._may_keep = may_keep
        self._on_closed = on_closed
        self._turn = asyncio.Lock()
        self._why_lost: str | None = None
        self._closing: asyncio.Future[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._listeners: list[socket.socket] = []

    def expire_after(self, seconds: float) -> None:
        """End the box when its lifetime [seconds] is over; the command that runs then is timed out."""
        self._expiry = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 10.0
    ) -> ExecResult:
        """Run one command in the workspace and wait for it.

        A program that does not exist gives status 127, one that cannot be started 126, as in a
        shell. Processes left in the background live on until they are too many, a later command
        is killed, or the box closes.
        """
        if not argv or not timeout_s > 0 or len(stdin) > MAX_TRANSFER_BYTES:
            raise ValueError(
                f"exec got argv={list(argv)[:3]}, timeout_s={timeout_s} and {len(stdin)} bytes of "
                f"stdin; give at least one argument, more than 0 seconds and at most "
                f"{MAX_TRANSFER_BYTES} bytes"
            )
        words = [_encoded(word) for word in argv]
        if any(b"\0" in word for word in words):
            return ExecResult(rc=126, stdout=b"", stderr=b"an argument contains a zero byte\n")
        milliseconds = max(1, round(timeout_s * 1000))
        request = [b"exec", b"%d" % milliseconds, b"%d" % self._output_bytes, stdin, *words]
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            reply = await self.request(request, timeout_s=timeout_s + REPLY_GRACE_S)
            rc, killed, dropped, microseconds, stdout, stderr = reply
            return ExecResult(
                rc=int(rc) if rc else None,
                stdout=stdout,
                stderr=stderr,
                timed_out=killed == b"time",
                num_dropped_bytes=int(dropped),
                wall_s=int(microseconds) / 1e6,
            )
        except OSError as error:  # the server refused the request itself
            return ExecResult(rc=126, stdout=b"", stderr=f"{error}\n".encode())
        except (SandboxError, ValueError) as error:
            expired = self._why_lost is not None and self._why_lost.startswith("its lifetime")
            failure: Literal["env_crashed"] | None = None if expired else "env_crashed"
            return ExecResult(
                rc=None,
                stdout=b"",
                stderr=str(error).encode(),
                timed_out=expired,
                wall_s=clock() - started,
                failure=failure,
            )

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of at most 16 MiB and the folders it needs; relative to the workspace."""
        if len(data) > MAX_TRANSFER_BYTES:
            raise OSError(errno.EFBIG, f"{len(data)} bytes; at most {MAX_TRANSFER_BYTES} at a time")
        await self.request([b"write", _encoded(path), data], timeout_s=REPLY_GRACE_S)

    async def read(self, path: str) -> bytes:
        """Read a regular file of at most 16 MiB; relative paths start at the workspace."""
        request = [b"read", _encoded(path), b"%d" % MAX_TRANSFER_BYTES]
        (data,) = await self.request(request, timeout_s=REPLY_GRACE_S)
        return data

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1:``port`` of the box; whoever has it is all that the box can reach.

        Close it before the box: a box with a port that is open is not used again.

        Raises:
            OSError: a program of the box has the port.
            SandboxError: the box is lost, or sent something else than a listening socket.
        """
        if not 1 <= port <= 65535:
            raise ValueError(f"port is {port}; allowed is 1 to 65535")
        await self.request([b"listen", b"%d" % port], timeout_s=REPLY_GRACE_S)
        descriptor = self._connection.take_descriptor()
        try:
            listener = None if descriptor is None else socket.socket(fileno=descriptor)
        except OSError as error:  # no socket at all
            os.close(descriptor or 0)
            raise SandboxError(self._no_listener()) from error
        if listener is None or not _is_listening(listener):
            if listener is not None:
                listener.close()
            raise SandboxError(self._no_listener())
        listener.setblocking(False)
        self._listeners.append(listener)
        return listener

    def _no_listener(self) -> str:
        self._lose("it sent something else than a listening socket")
        return f"box {self.id} sent something else than a listening socket; open a new one"

    async def close(self) -> None:
        """End every process of the box and remove all it wrote; a second call waits for the first."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def request(self, fields: Sequence[bytes], *, timeout_s: float) -> list[bytes]:
        """Send one frame and return the fields of the answer, without its status.

        Raises:
            SandboxError: the box is closed, died, fell silent or sent nonsense.
            OSError: the box refused, with the error number it met.
        """
        async with self._turn:
            if self._why_lost is not None:
                raise SandboxError(
                    f"box {self.id} cannot be used: {self._why_lost}; open a new one"
                )
            silent = f"its exec server did not answer within {timeout_s:.1f} s"
            # Losing the box ends the exchange, and costs less to prepare than ``asyncio.timeout``.
            deadline = asyncio.get_running_loop().call_later(timeout_s, self._lose, silent)
            try:
                reply = unpack(await self._connection.exchange(pack(fields)))
            except asyncio.CancelledError:
                self._lose("a request to it was cancelled half-way")
                raise
            except (OSError, SandboxError) as error:
                self._lose(f"it died or broke the protocol ({error})")
            finally:
                deadline.cancel()
        if self._why_lost is not None:
            raise SandboxError(f"box {self.id} is lost: {self._why_lost}; open a new one")
        if reply[0] == b"error":
            number, said = int(reply[1]), reply[2].decode("utf-8", "replace")
            raise OSError(number, f"{os.strerror(number)} (in box {self.id}): {said}")
        return reply[1:]

    def _lose(self, why: str) -> None:
        """Note why the box is unusable and end its processes at once."""
        if self._why_lost is None:
            self._why_lost = why
            self.vessel.kill()

    def _expire(self, seconds: float) -> None:
        self._lose(f"its lifetime of {seconds:g} s is over")

    async def _close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        # A port that somebody still holds would be taken in the next life of the box.
        is_idle = not self._turn.locked() and all(sock.fileno() < 0 for sock in self._listeners)
        is_kept = is_idle and self._may_keep(self) and await self._cleaned()
        if self._why_lost is None:
            self._why_lost = "it was closed"
        try:
            if not is_kept:
                await self.vessel.end()
                async with self._turn:  # a request may still hold the socket
                    self._connection.close()
        finally:
            self._on_closed(self, is_kept)

    async def _cleaned(self) -> bool:
        """Whether nothing of this box's life is left in its vessel."""
        try:
            await self.request([b"clean"], timeout_s=CLOSE_GRACE_S)
        except (OSError, SandboxError):
            return False
        return True


def _is_listening(sock: socket.socket) -> bool:
    """Whether it is what was asked for: the box is not trusted."""
    return (
        sock.family == socket.AF_INET
        and sock.type == socket.SOCK_STREAM
        and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    )


def _encoded(text: str) -> bytes:
    """Return the bytes of a path or an argument; what a model wrote may not be valid text."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


async def _readable(pidfd: int, seconds: float) -> bool:
    """Wait until a process has ended; False when it did not within the time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True
