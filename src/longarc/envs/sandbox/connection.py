"""The host's end of the socket to an exec server.

::

    exchange --frame--> exec server
        ^ waits            | frame, in whatever pieces
        +---- _take <------+

The event loop watches the socket from the first frame until the end: to watch it anew for every frame,
and to wait for a length and then for a body, would cost more than all else that the host does for a
command. So what the other side sends while nobody waits is noticed, and ends the conversation.
"""

import asyncio
import errno
import os
import socket

from longarc.envs.sandbox.wire import U32
from longarc.errors import SandboxError

MAX_REPLY_BYTES = 64 << 20
"""Anything longer is refused: the other side of the socket is not trusted."""
RECEIVE_BYTES = 1 << 16
"""Most that is taken from the socket at a time."""


class Connection:
    """A conversation in which each frame gets one frame for an answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._watching: asyncio.AbstractEventLoop | None = None
        self._reply: asyncio.Future[bytes | None] | None = None
        """What ``exchange`` waits for; None tells it that nothing will come."""
        self._received = bytearray()
        self._descriptor: int | None = None
        self._why_over = ""

    async def exchange(self, frame: bytes) -> bytes:
        """Send a frame and return the body of the answer; one call at a time.

        Raises:
            SandboxError: the other side is gone or sent nonsense.
            OSError: the socket failed.
        """
        if self._why_over:
            raise SandboxError(self._why_over)
        loop = asyncio.get_running_loop()
        if self._watching is None:
            loop.add_reader(self._sock.fileno(), self._take)
            self._watching = loop
        self._drop_descriptor()
        reply: asyncio.Future[bytes | None] = loop.create_future()
        self._reply = reply
        try:
            await loop.sock_sendall(self._sock, frame)
            body = await reply
        finally:
            self._reply = None
        if body is None:
            raise SandboxError(self._why_over)
        return body

    def take_descriptor(self) -> int | None:
        """Return the descriptor that came with the last answer, which is the caller's from then on."""
        taken, self._descriptor = self._descriptor, None
        return taken

    def shut_down(self) -> None:
        """End the conversation in both directions; whoever waits for an answer is told."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise

    def close(self) -> None:
        """Give the socket back."""
        self._end("the connection is closed")
        self._drop_descriptor()
        self._sock.close()

    def _take(self) -> None:
        """Take what has arrived; the event loop calls this."""
        try:
            # The kernel closes descriptors beyond the one that there is room for.
            part, descriptors, _, _ = socket.recv_fds(
                self._sock, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
            if descriptors:
                self._drop_descriptor()
                self._descriptor = descriptors[0]
            body = self._add(part)
        except BlockingIOError:
            return
        except (OSError, SandboxError) as error:
            self._end(str(error))
            return
        if body is not None and self._reply is not None:
            self._reply.set_result(body)

    def _add(self, part: bytes) -> bytes | None:
        """Append to the frame that is arriving; return its body once it is whole."""
        if not part:
            raise SandboxError("end of file")
        if self._reply is None or self._reply.done():
            raise SandboxError(f"{len(part)} bytes that nobody asked for")
        self._received += part
        if len(self._received) < U32.size:
            return None
        (length,) = U32.unpack_from(self._received)
        if not 0 < length <= MAX_REPLY_BYTES:
            raise SandboxError(f"a reply of {length} bytes; at most {MAX_REPLY_BYTES} are accepted")
        num_missing = U32.size + length - len(self._received)
        if num_missing < 0:
            raise SandboxError(f"{-num_missing} bytes that nobody asked for")
        if num_missing:
            return None
        body = bytes(self._received[U32.size :])
        self._received.clear()
        return body

    def _drop_descriptor(self) -> None:
        if (left := self.take_descriptor()) is not None:
            os.close(left)

    def _end(self, why: str) -> None:
        self._why_over = self._why_over or why
        if self._watching is not None:
            self._watching.remove_reader(self._sock.fileno())
            self._watching = None
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(None)
