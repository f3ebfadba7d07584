"""The one door of a box: a socket that listens inside and is held outside; and what a box shows of the host."""

import asyncio
import os
import socket

import pytest

from longarc.envs.sandbox.backend import BwrapBackend
from longarc.errors import ConfigError, SandboxError
from longarc.records.ports import SandboxSpec

PORT = 42101
ASK = f"exec 3<>/dev/tcp/127.0.0.1/{PORT}; echo question >&3; read answer <&3; echo $answer"


@pytest.fixture
async def reusing(capabilities):
    backend = BwrapBackend(max_boxes=4, max_idle=2)
    yield backend
    await backend.close()


async def answer_once(listener: socket.socket, text: bytes) -> bytes:
    """Answer the first connection of a listening socket."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)
    with connection:
        asked = await loop.sock_recv(connection, 100)
        await loop.sock_sendall(connection, text + b"\n")
    return asked


async def test_what_listens_in_the_box_answers_outside(box):
    with await box.listen(PORT) as listener:
        assert listener.getsockname() == ("127.0.0.1", PORT)
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(answer_once(listener, b"the answer"))
            asking = tasks.create_task(box.exec(["bash", "-c", ASK]))
    assert (answering.result(), asking.result().stdout) == (b"question\n", b"the answer\n")


async def test_each_box_has_its_own_port_and_the_host_has_none(backend):
    boxes = [await backend.create(SandboxSpec(files={})) for _ in range(2)]
    listeners = [await box.listen(PORT) for box in boxes]
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", PORT)):
        pass
    for number, (box, listener) in enumerate(zip(boxes, listeners, strict=True)):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer_once(listener, b"%d" % number))
            asking = tasks.create_task(box.exec(["bash", "-c", ASK]))
        assert asking.result().stdout == b"%d\n" % number
        listener.close()


async def test_a_port_that_a_program_of_the_box_has_is_an_error_with_its_number(box):
    serve = f"python3 -m http.server -b 127.0.0.1 {PORT} >/dev/null 2>&1 & sleep 0.5"
    await box.exec(["bash", "-c", serve])
    with pytest.raises(OSError, match="Address already in use"):
        await box.listen(PORT)
    assert (await box.exec(["true"])).rc == 0
    with pytest.raises(ValueError, match="port is 70000; allowed is 1 to 65535"):
        await box.listen(70000)


async def test_a_box_that_is_used_again_has_no_port_of_its_earlier_life(reusing):
    first = await reusing.create(SandboxSpec(files={}))
    (await first.listen(PORT)).close()
    await first.close()
    second = await reusing.create(SandboxSpec(files={}))
    assert second.vessel is first.vessel
    assert b"refused" in (await second.exec(["bash", "-c", ASK])).stderr
    with await second.listen(PORT):
        pass


async def test_a_box_whose_port_is_still_open_is_not_used_again(reusing):
    first = await reusing.create(SandboxSpec(files={}))
    with await first.listen(PORT):
        await first.close()
    second = await reusing.create(SandboxSpec(files={}))
    assert second.vessel is not first.vessel


async def test_anything_but_a_listening_socket_ends_the_box(box, monkeypatch):
    async def no_reply(fields, *, timeout_s):
        return []

    monkeypatch.setattr(box, "request", no_reply)
    with pytest.raises(SandboxError, match="something else than a listening socket"):
        await box.listen(PORT)
    for sent in (socket.socket(), socket.socket(type=socket.SOCK_DGRAM)):
        monkeypatch.setattr(box._connection, "take_descriptor", sent.detach)
        with pytest.raises(SandboxError, match="something else than a listening socket"):
            await box.listen(PORT)
    monkeypatch.setattr(
        box._connection, "take_descriptor", lambda: os.open("/dev/null", os.O_RDONLY)
    )
    with pytest.raises(SandboxError, match="something else than a listening socket"):
        await box.listen(PORT)


async def test_a_box_shows_what_the_spec_says_and_nothing_can_be_written_there(reusing, tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if not os.stat(folder).st_mode & 0o001 and os.access(folder, os.W_OK):
            folder.chmod(0o755)
    program = tmp_path / "program"
    program.mkdir()
    (program / "run.sh").write_text("echo it runs")
    (tmp_path / "note").write_text("a file\n")
    shown = {"/opt/agent": str(program), "/opt/note": str(tmp_path / "note")}
    box = await reusing.create(SandboxSpec(files={}, shown=shown))
    done = await box.exec(
        ["bash", "-c", "sh /opt/agent/run.sh; touch /opt/agent/x; ls /opt; cat /opt/note"]
    )
    assert done.stdout == b"it runs\nagent\nnote\na file\n"
    assert b"Read-only file system" in done.stderr
    await box.close()
    plain = await reusing.create(SandboxSpec(files={}))
    assert plain.vessel is not box.vessel
    assert (await plain.exec(["ls", "/opt"])).rc != 0


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (
            {"/usr/agent": "/usr"},
            "'/usr/agent' as a path in the box; allowed are plain paths below /opt/",
        ),
        ({"/opt/../usr": "/usr"}, "as a path in the box"),
        ({"/opt/agent": "/no/such/folder"}, "/no/such/folder does not exist or cannot be read"),
    ],
)
async def test_what_cannot_be_shown_is_refused_with_its_path(backend, shown, said):
    with pytest.raises(ConfigError, match=said):
        await backend.create(SandboxSpec(files={}, shown=shown))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts boxes as another user")
async def test_what_the_user_of_the_box_may_not_read_is_refused_with_the_way_out(backend, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=r"cannot be read by uid .* chmod o"):
        await backend.create(SandboxSpec(files={}, shown={"/opt/agent": str(secret)}))


async def test_open_files_are_limited_as_asked(backend):
    count = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    for number in (64, 1000):
        box = await backend.create(SandboxSpec(files={}, num_open_files=number))
        assert (await box.exec(["python3", "-c", count])).stdout == b"%d\n" % number
