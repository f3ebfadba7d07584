"""The load on a gateway: agents that take their turns, in a process of its own. Run by gateway.py.

Bodies are made beforehand and differ between sessions in every message, so that no cache of one session helps
another. What each reply has to say is known, because the engine behind always says the same; a reply that says
anything else is an error.

* ``closed``: each client sends its next turn when it has the last answer. Tells throughput; its latencies leave out
  the requests that were not sent meanwhile (coordinated omission), and are not used.
* ``open``: turns have a time at which they are due, whatever became of those before. Latency counts from then.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import uvloop

TAG = b"@@@@@@@@"
"""In the bodies; replaced by the session's number."""


class Client(asyncio.Protocol):
    """One connection; ``ask`` sends a request and waits for the whole answer."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._done: asyncio.Future[tuple[int, bytes]] | None = None
        self.first_s = 0.0
        """When the first piece of text came, of a streamed answer."""
        self._waits_for = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the connection was closed"))

    def on_body(self, body: bytes) -> None:
        if not self.first_s and self._waits_for and self._waits_for in body:
            self.first_s = time.perf_counter()
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result((self._parser.get_status_code(), b"".join(self._chunks)))
        self._parser = httptools.HttpResponseParser(self)

    async def ask(self, request: bytes, *, waits_for: bytes = b"") -> tuple[int, bytes]:
        """Return status and body."""
        self._chunks, self.first_s, self._waits_for = [], 0.0, waits_for
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done


@dataclass
class Session:
    """An agent: its key, its connection and where it is."""

    number: int
    path: bytes
    key: bytes
    turn: int = 0
    client: Client | None = None
    is_free: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Tally:
    """What was seen."""

    latencies_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Load:
    """Sends the turns of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._host, self._port = "127.0.0.1", int(job["port"])
        self._bodies = [Path(path).read_bytes() for path in job["bodies"]]
        self._reply = job["reply"].encode()
        self._first = job.get("first", "").encode()
        self._tally = Tally()

    async def run(self) -> dict[str, Any]:
        """Send all; return figures."""
        started_s = time.perf_counter()
        used_s = _processor_s(self._job["pid"])
        await (self._closed() if self._job["mode"] == "closed" else self._open())
        wall_s = time.perf_counter() - started_s
        tally = self._tally
        return {
            "wall_s": wall_s,
            "processor_s": _processor_s(self._job["pid"]) - used_s,
            "num_answers": len(tally.latencies_s),
            "latencies_s": sorted(tally.latencies_s),
            "firsts_s": sorted(tally.firsts_s),
            "num_errors": len(tally.errors),
            "errors": tally.errors[:3],
        }

    async def _closed(self) -> None:
        """Clients take sessions from a common pile, one after the other, until the time is over."""
        ends_s = time.perf_counter() + self._job["duration_s"]
        sessions = iter(self._sessions())

        async def work() -> None:
            client = await self._connected()
            while time.perf_counter() < ends_s:
                session = next(sessions, None)
                if session is None:
                    return
                session.client = client
                while session.turn < len(self._bodies) and time.perf_counter() < ends_s:
                    await self._turn(session, due_s=time.perf_counter())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._job["clients"]):
                tasks.create_task(work())

    async def _open(self) -> None:
        """Turn number i is due at i / rate; sessions take turns, so that one has its next when all had theirs."""
        sessions = self._sessions()
        count = min(self._job["num_turns"], len(sessions) * len(self._bodies))
        wave = self._job.get("at_once") or len(sessions)
        order = _waves(len(sessions), len(self._bodies), wave)
        began_s = time.perf_counter() + 0.2

        async def turn(session: Session, due_s: float) -> None:
            async with session.is_free:  # an answer that is late makes the next one late as well
                if session.client is None:
                    session.client = await self._connected()
                await self._turn(session, due_s=due_s)

        async with asyncio.TaskGroup() as tasks:
            for index, number in zip(range(count), order, strict=False):
                due_s = began_s + index / self._job["rate"]
                await asyncio.sleep(due_s - time.perf_counter())
                tasks.create_task(turn(sessions[number], due_s))

    async def _turn(self, session: Session, *, due_s: float) -> None:
        assert session.client is not None
        tag = b"%08d" % session.number
        body = self._bodies[session.turn % len(self._bodies)].replace(TAG, tag)
        session.turn += 1
        head = b"POST %s HTTP/1.1\r\nhost: g\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        request = head % (session.path, session.key, len(body)) + body
        try:
            status, answer = await session.client.ask(request, waits_for=self._first)
        except ConnectionError as error:
            self._tally.errors.append(str(error))
            session.client = await self._connected()
            return
        now_s = time.perf_counter()
        if status != 200:
            self._tally.errors.append(f"{status} {answer[:300]!r}")
        elif not self._is_right(answer):
            self._tally.errors.append(f"another answer: {answer[:300]!r}")
        else:
            self._tally.latencies_s.append(now_s - due_s)
            if self._first:
                self._tally.firsts_s.append(session.client.first_s - due_s)

    def _is_right(self, answer: bytes) -> bool:
        if not self._first:
            return self._reply in answer
        text = []
        for line in answer.split(b"\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text.append(choice["delta"].get("content") or "")
        return "".join(text).encode() == self._reply

    def _sessions(self) -> Sequence[Session]:
        return [
            Session(number, path.encode(), key.encode())
            for number, (path, key) in enumerate(self._job["sessions"], start=1)
        ]

    async def _connected(self) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(Client, self._host, self._port)
        return client


def _waves(num_sessions: int, num_turns: int, at_once: int) -> Sequence[int]:
    """Return the sessions in the order of their turns: ``at_once`` of them live side by side."""
    order: list[int] = []
    for first in range(0, num_sessions, at_once):
        order += list(range(first, min(first + at_once, num_sessions))) * num_turns
    return order


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    print(json.dumps(uvloop.run(Load(json.loads(Path(sys.argv[1]).read_text())).run())))
