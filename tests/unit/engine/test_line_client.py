"""The small HTTP client of engine streams, against servers that behave well and badly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from longarc.engine.line_client import LineClient, LineClientError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.startswith(b"content-length")
    )
    return head, await reader.readexactly(length)


@asynccontextmanager
async def client_of(serve: Serve, *, idle_s: float = 60.0) -> AsyncIterator[LineClient]:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(closing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = LineClient(
        f"http://127.0.0.1:{port}", headers={"x-key": "k"}, connect_timeout_s=5.0, idle_s=idle_s
    )
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


async def everything(client: LineClient) -> list[bytes]:
    async with client.post("/", b"") as reply:
        return [line async for line in reply.lines()]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nX-Instance: i\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


async def test_lines_arrive_whole_however_they_were_cut_and_the_connection_is_kept():
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(b"connection")
        while True:
            head, body = await request_of(reader)
            assert b"x-key: k\r\n" in head
            assert head.startswith(b"POST /v1/stream HTTP/1.1\r\n")
            seen.append(body)
            writer.write(HEAD + chunk(b'{"a":1}\n{"b"') + chunk(b":2}\n\n{") + chunk(b"}\n") + END)

    async with client_of(serve) as client:
        for body in (b"one", b"two"):
            async with client.post("/v1/stream", body) as reply:
                assert (reply.status, reply.headers["x-instance"]) == (200, "i")
                lines = [line async for line in reply.lines()]
            assert lines == [b'{"a":1}', b'{"b":2}', b"", b"{}"]
    assert seen == [b"connection", b"one", b"two"]


async def test_a_reader_that_has_what_it_wants_leaves_the_connection_for_the_next_request():
    num_connections = 0
    may_end = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while True:
            await request_of(reader)
            writer.write(HEAD + chunk(b"last\n"))
            await may_end.wait()
            writer.write(END)
            await writer.drain()

    async with client_of(serve) as client:
        async with client.post("/", b"") as reply:
            async for line in reply.lines():
                assert line == b"last"
                reply.is_as_good_as_over()
                break
        may_end.set()
        while not client.num_idle:
            await asyncio.sleep(0)
        async with client.post("/", b"") as reply:
            assert [line async for line in reply.lines()] == [b"last"]
    assert num_connections == 1


async def test_leaving_in_the_middle_hangs_up_so_that_the_server_stops():
    has_hung_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(b"first\n"))
        assert await reader.read() == b""
        has_hung_up.set()

    async with client_of(serve) as client:
        async with client.post("/", b"") as reply:
            async for _ in reply.lines():
                break
        await asyncio.wait_for(has_hung_up.wait(), 5)
        assert client.num_idle == 0


async def test_a_reader_that_is_slow_holds_the_server_back():
    num_sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await request_of(reader)
        writer.write(HEAD)
        for _ in range(64):
            writer.write(chunk(b"x" * (1 << 20) + b"\n"))
            await writer.drain()
            num_sent += 1
        writer.write(END)
        await writer.drain()

    async with client_of(serve) as client, client.post("/", b"") as reply:
        lines = reply.lines()
        assert len(await anext(lines)) == 1 << 20
        for _ in range(2000):
            await asyncio.sleep(0)
        assert num_sent < 32
        assert sum([1 async for _ in lines]) == 63


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "hung up"),
        (HEAD + chunk(b"half\n"), "hung up"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "hung up"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no HTTP"),
    ],
)
async def test_an_answer_that_ends_early_or_is_none_is_an_error(answer, message):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer)
        await writer.drain()

    async with client_of(serve) as client:
        with pytest.raises(LineClientError, match=message):
            await everything(client)
        assert client.num_idle == 0


async def test_an_error_page_is_read_whole_and_a_server_that_closes_is_not_used_again():
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await request_of(reader)
        writer.write(b"HTTP/1.1 502 Bad\r\nconnection: close\r\n\r\n<html>\nbad")
        await writer.drain()

    async with client_of(serve) as client:
        for _ in range(2):
            async with client.post("/", b"") as reply:
                assert reply.status == 502
                assert await reply.read() == b"<html>\nbad"
    assert num_connections == 2


async def test_an_idle_connection_is_not_used_when_it_may_be_closed_already():
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while True:
            await request_of(reader)
            writer.write(HEAD + END)

    async with client_of(serve, idle_s=-1.0) as client:
        for _ in range(2):
            async with client.post("/", b"") as reply:
                assert await reply.read() == b""
    assert num_connections == 2


async def test_a_server_that_is_not_there_is_an_error():
    client = LineClient("http://127.0.0.1:1", headers={}, connect_timeout_s=5.0)
    with pytest.raises(LineClientError, match="ConnectionRefusedError"):
        async with client.post("/", b""):
            pass


@pytest.mark.parametrize(
    "unasked",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nx", b"x", HEAD + chunk(b"other\n") + END],
)
@pytest.mark.parametrize("is_later", [False, True])
async def test_what_a_server_says_unasked_between_requests_is_not_taken_for_an_answer(
    unasked, is_later
):
    said = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            answer = HEAD + chunk(b"ok\n") + END
            if is_later:
                writer.write(answer)
                await asyncio.sleep(0.05)
                writer.write(unasked)
                await writer.drain()
            else:
                writer.write(answer + unasked)
            said.set()

    async with client_of(serve) as client, asyncio.timeout(10):
        assert await everything(client) == [b"ok"]
        await said.wait()
        await asyncio.sleep(0.05)
        assert await everything(client) == [b"ok"]
