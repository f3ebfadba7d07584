"""Start the processes of one box; runs in the backend's spawner thread.

::

    setpriv (root only) -> outer bwrap -> inner bwrap -> python3 execd.py    each by exec or clone

Both bwrap calls run the binary, and find the wheel's libraries, through inherited descriptors: the
virtual environment may lie in a folder that the sandbox user cannot enter, or under the scratch
folder that the outer call covers.
"""

import importlib.resources
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from longarc.envs.sandbox.host import Host
from longarc.envs.sandbox.layout import (
    IDENTITY_FILES,
    SERVER_PATH,
    inner_options,
    outer_options,
)
from longarc.envs.sandbox.seccomp import seccomp_program
from longarc.errors import SandboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A box that is starting."""

    process: subprocess.Popen[bytes]
    """The outer bwrap; when it is gone, so is every process of the box."""
    connection: socket.socket
    """Our end, not blocking; the exec server holds the other."""
    stderr_fd: int
    """A memory file with whatever setpriv and bwrap complain about; the owner closes it."""

    def complaint(self) -> str:
        """Return what was written to stderr until now, and close it."""
        try:
            return os.pread(self.stderr_fd, 1 << 14, 0).decode("utf-8", "replace")
        finally:
            os.close(self.stderr_fd)

    def discard(self) -> None:
        """End a box that nobody waits for any more."""
        self.connection.close()
        os.close(self.stderr_fd)
        self.process.kill()
        self.process.wait()


def spawn(host: Host, *, disk_bytes: int) -> Spawned:
    """Start one box; blocks for about a millisecond.

    Raises:
        SandboxError: the operating system refused to start the first program.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    stderr = os.memfd_create("bwrap-stderr")
    try:
        with _descriptors() as open_fd, theirs:
            command = _command(host, open_fd, server_fd=theirs.fileno(), disk_bytes=disk_bytes)
            environment = {"PATH": "/usr/bin:/bin"}
            if host.bubblewrap.libraries is not None:
                libraries = open_fd.path(host.bubblewrap.libraries, os.O_PATH | os.O_DIRECTORY)
                environment["LD_LIBRARY_PATH"] = f"/proc/self/fd/{libraries}"
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *open_fd.fds],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env=environment,
                cwd="/",
                start_new_session=True,  # a Ctrl-C at the terminal is for us to handle
            )
    except OSError as error:
        ours.close()
        os.close(stderr)
        raise SandboxError(
            f"a box could not be started: {error}; limits on processes, open files or memory are "
            f"the usual reason (see ulimit -a): raise them, or open fewer boxes at a time"
        ) from error
    return Spawned(process=process, connection=ours, stderr_fd=stderr)


class _Descriptors:
    """Descriptors to hand to a child, closed here once it has them."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def data(self, content: bytes) -> int:
        """Return a descriptor from which ``content`` can be read."""
        fd = os.memfd_create("box")
        self.fds.append(fd)
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def path(self, path: str, flags: int) -> int:
        """Return a descriptor of an existing file or folder."""
        fd = os.open(path, flags)
        self.fds.append(fd)
        return fd


@contextmanager
def _descriptors() -> Iterator[_Descriptors]:
    opened = _Descriptors()
    try:
        yield opened
    finally:
        for fd in opened.fds:
            os.close(fd)


def _command(host: Host, open_fd: _Descriptors, *, server_fd: int, disk_bytes: int) -> list[str]:
    bwrap = f"/proc/self/fd/{open_fd.path(host.bubblewrap.path, os.O_RDONLY)}"
    server = importlib.resources.files("longarc.envs.sandbox").joinpath("execd.py").read_bytes()
    contents = {**IDENTITY_FILES, SERVER_PATH: server}
    inner = inner_options(
        host,
        data_fds={path: open_fd.data(content) for path, content in contents.items()},
        seccomp_fd=open_fd.data(seccomp_program()),
    )
    outer = outer_options(host, disk_bytes=disk_bytes)
    command = []
    if host.setpriv is not None:
        command += [host.setpriv, "--reuid", str(host.uid), "--regid", str(host.gid)]
        command += ["--clear-groups", "--"]
    command += [bwrap, "--args", str(open_fd.data(_joined(outer))), "--"]
    command += [bwrap, "--args", str(open_fd.data(_joined(inner))), "--"]
    return [*command, host.python, "-ISE", SERVER_PATH, str(server_fd)]


def _joined(options: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(option) + b"\0" for option in options)
