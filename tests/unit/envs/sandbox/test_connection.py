"""The host's end of the socket: what the other side sends is not trusted."""

import asyncio
import os
import socket

import pytest

from longarc.envs.sandbox.connection import MAX_REPLY_BYTES, RECEIVE_BYTES, Connection
from longarc.envs.sandbox.wire import U32, pack
from longarc.errors import SandboxError


@pytest.fixture
async def ends():
    """Return a connection and the socket that the exec server would hold."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


async def answered(connection, theirs, *pieces, frame=b"ask"):
    """Send a frame, and answer it with some pieces, each in a read of its own."""
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(connection.exchange(frame))
    await loop.sock_recv(theirs, len(frame))
    for piece in pieces:
        await loop.sock_sendall(theirs, piece)
        await asyncio.sleep(0)
    return await waiting


async def test_an_answer_is_whole_however_it_is_cut(ends):
    reply = pack([b"ok", b"x" * 10])
    for cut in range(1, len(reply)):
        assert await answered(*ends, reply[:cut], reply[cut:]) == reply[U32.size :]


async def test_frames_larger_than_any_buffer_come_and_go(ends):
    connection, theirs = ends
    loop = asyncio.get_running_loop()
    frame = pack([b"y" * (8 * RECEIVE_BYTES)])
    waiting = asyncio.ensure_future(connection.exchange(frame))
    received = bytearray()
    while len(received) < len(frame):
        received += await loop.sock_recv(theirs, RECEIVE_BYTES)
    await loop.sock_sendall(theirs, received)
    assert await waiting == frame[U32.size :]


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([U32.pack(0)], "a reply of 0 bytes"),
        ([U32.pack(MAX_REPLY_BYTES + 1)], "at most"),
        ([pack([b"ok"]) + b"!"], "1 bytes that nobody asked for"),
    ],
)
async def test_nonsense_ends_the_conversation_for_good(ends, pieces, said):
    with pytest.raises(SandboxError, match=said):
        await answered(*ends, *pieces)
    with pytest.raises(SandboxError, match=said):
        await ends[0].exchange(b"again")


async def test_what_comes_while_nobody_waits_is_no_answer_to_the_next_frame(ends):
    connection, theirs = ends
    await answered(connection, theirs, pack([b"ok"]))
    theirs.send(pack([b"forged"]))
    await asyncio.sleep(0.01)
    with pytest.raises(SandboxError, match="nobody asked for"):
        await connection.exchange(b"ask")


async def test_an_end_is_told_to_who_waits_and_to_who_comes_later(ends):
    connection, theirs = ends
    waiting = asyncio.ensure_future(connection.exchange(b"ask"))
    await asyncio.get_running_loop().sock_recv(theirs, 3)
    theirs.close()
    with pytest.raises(SandboxError, match="end of file"):
        await waiting
    with pytest.raises(SandboxError, match="end of file"):
        await connection.exchange(b"ask")


async def test_shutting_down_ends_a_frame_that_cannot_be_sent(ends):
    connection, _ = ends
    waiting = asyncio.ensure_future(connection.exchange(bytes(64 << 20)))
    await asyncio.sleep(0.01)
    connection.shut_down()
    with pytest.raises((SandboxError, OSError)):
        await waiting


async def test_a_descriptor_comes_with_an_answer_and_is_closed_where_nobody_takes_it(
    ends, tmp_path
):
    connection, theirs = ends
    loop = asyncio.get_running_loop()

    async def given(*numbers: int) -> bytes:
        waiting = asyncio.ensure_future(connection.exchange(b"ask"))
        await loop.sock_recv(theirs, 3)
        socket.send_fds(theirs, [pack([b"ok"])], numbers)
        return await waiting

    with (tmp_path / "file").open("w") as file:
        assert connection.take_descriptor() is None
        await given(file.fileno())
        taken = connection.take_descriptor()
        assert os.path.samefile(f"/proc/self/fd/{taken}", tmp_path / "file")
        os.close(taken)
        before = set(os.listdir("/proc/self/fd"))
        await given(file.fileno())
        await given(file.fileno(), file.fileno(), file.fileno())
        await answered(connection, theirs, pack([b"ok"]))
        assert set(os.listdir("/proc/self/fd")) == before
        await given(file.fileno())
        connection.close()
        assert len(os.listdir("/proc/self/fd")) == len(before) - 1  # the connection's own
