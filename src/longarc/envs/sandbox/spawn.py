"""Start the processes of one box; runs in the backend's spawner thread.

::

    setpriv (root only) -> outer bwrap -> inner bwrap -> python3 execd.py    each by exec or clone

Both bwrap calls run the binary, and find the wheel's libraries, through inherited descriptors: the
virtual environment may lie in a folder that the sandbox user cannot enter, or under the scratch
folder that the outer call covers.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
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

DISCARD_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A box that is starting; ``close_files`` when it has started or failed."""

    process: subprocess.Popen[bytes]
    """The outer bwrap. It ends after all others if they end by themselves, before them if killed."""
    connection: socket.socket
    """Our end, not blocking; the exec server holds the other."""
    stderr_fd: int
    """A memory file with whatever setpriv and bwrap complain about."""
    info_fd: int
    """A memory file where the inner bwrap writes the process id of the exec server."""

    def complaint(self) -> str:
        """Return what was written to stderr until now."""
        return os.pread(self.stderr_fd, 1 << 14, 0).decode("utf-8", "replace")

    def server_pid(self) -> int:
        """Return the process id, as the host counts, of a server that has answered."""
        return int(json.loads(os.pread(self.info_fd, 1 << 14, 0))["child-pid"])

    def close_files(self) -> None:
        """Give back the memory files."""
        os.close(self.stderr_fd)
        os.close(self.info_fd)

    def discard(self) -> None:
        """End a box that nobody waits for any more; blocks until it is gone."""
        self.connection.close()
        self.close_files()
        try:
            self.process.wait(DISCARD_GRACE_S)  # the server exits when it finds nobody there
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def spawn(host: Host, *, disk_bytes: int, shown: Mapping[str, str]) -> Spawned:
    """Start one box; blocks for about a millisecond.

    Args:
        host: what the machine offers.
        disk_bytes: what the box may write.
        shown: what can be read in it of the host besides, by its path in the box.

    Raises:
        SandboxError: the operating system refused to start the first program.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    stderr, info = os.memfd_create("bwrap-stderr"), os.memfd_create("bwrap-info")
    try:
        with _descriptors() as open_fd, theirs:
            options = outer_options(host, disk_bytes=disk_bytes)
            command = _command(
                host, open_fd, options, shown, server_fd=theirs.fileno(), info_fd=info
            )
            environment = {"PATH": "/usr/bin:/bin"}
            if host.bubblewrap.libraries is not None:
                libraries = open_fd.path(host.bubblewrap.libraries, os.O_PATH | os.O_DIRECTORY)
                environment["LD_LIBRARY_PATH"] = f"/proc/self/fd/{libraries}"
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), info, *open_fd.fds],
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
        os.close(info)
        raise SandboxError(
            f"a box could not be started: {error}; limits on processes, open files or memory are "
            f"the usual reason (see ulimit -a): raise them, or open fewer boxes at a time"
        ) from error
    return Spawned(process=process, connection=ours, stderr_fd=stderr, info_fd=info)


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


def _command(
    host: Host,
    open_fd: _Descriptors,
    outer: Sequence[str],
    shown: Mapping[str, str],
    *,
    server_fd: int,
    info_fd: int,
) -> list[str]:
    bwrap = f"/proc/self/fd/{open_fd.path(host.bubblewrap.path, os.O_RDONLY)}"
    contents = {**IDENTITY_FILES, SERVER_PATH: host.server}
    inner = inner_options(
        host,
        data_fds={path: open_fd.data(content) for path, content in contents.items()},
        seccomp_fd=open_fd.data(seccomp_program()),
        shown=shown,
    )
    command = []
    if host.setpriv is not None:
        command += [host.setpriv, "--reuid", str(host.uid), "--regid", str(host.gid)]
        command += ["--clear-groups", "--"]
    command += [bwrap, "--args", str(open_fd.data(_joined(outer))), "--"]
    command += [bwrap, "--info-fd", str(info_fd), "--args", str(open_fd.data(_joined(inner))), "--"]
    return [*command, host.python, "-ISE", SERVER_PATH, str(server_fd)]


def _joined(options: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(option) + b"\0" for option in options)
