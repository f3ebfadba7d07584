"""The exec server: process 1 of a box, started as ``python3 -ISE execd.pyc FD``.

::

    host --frame--> [ setup | exec | read | write | listen | clean ] --frame--> host   one request at a time
                            |
                            +-- posix_spawn --> command (own session)
                            waits for: its output, its end, SIGCHLD of orphans, its deadline, the host

It runs inside the box with the box's own rights, so a path or a symlink it follows on behalf of the
host leads nowhere that the agent could not go by itself. As process 1 it cannot be killed from
inside, ends every process with ``kill(-1, SIGKILL)``, and takes the whole box down when it exits,
which it does as soon as the host closes the socket. Standard library only: nothing else is there.
"""

import ctypes
import errno
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

U32 = struct.Struct("<I")
WORKSPACE = "/workspace"
WRITABLE = {"/workspace": 0o755, "/tmp": 0o1777, "/home/agent": 0o755, "/dev/shm": 0o1777}
"""Every place where a command can leave something, with the mode it has at the start."""
MAX_CLEAN_FILES = 4096
"""With more files than this a new box is cheaper than a clean one."""
MAX_REQUEST_BYTES = 1 << 30
CHUNK_BYTES = 1 << 16
FLOOD_BYTES = 64 << 20
"""A command that wrote this much beyond its output cap is killed."""
CHECK_S = 0.2
"""How often memory and number of files are looked at while a command runs [seconds]."""
DISK_BYTES_PER_FILE = 4096
MIN_FILES = 4096
"""A file costs the kernel memory that the quota does not count, so their number is limited as well."""
PR_SET_DUMPABLE = 4
IGNORED_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE]
ENOUGH_FOR_THE_PIPE_BYTES = 1 << 20


class Server:
    """Serves one host over one inherited socket until the host goes away."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.null = os.open("/dev/null", os.O_RDWR)
        self.wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        for name in IGNORED_SIGNALS:
            signal.signal(name, signal.SIG_IGN)
        self.memory_bytes = 0
        self.max_processes = 0
        self.pristine: tuple[int, int] | None = None
        self.max_files = 0
        self.handed_over = -1

    def serve(self) -> None:
        """Answer requests until end of file, then take the box down."""
        while True:
            fields = self._receive()
            try:
                reply = self._answer(fields[0], fields[1:])
            except OSError as error:
                reply = _refused(error.errno or errno.EIO, error)
            except ValueError as error:  # a zero byte in a path, say
                reply = _refused(errno.EINVAL, error)
            except (MemoryError, RecursionError) as error:
                reply = _refused(errno.ENOMEM, error)
            self._reply(_pack(reply))

    def _answer(self, operation: bytes, fields: list[bytes]) -> list[bytes]:
        if operation == b"exec":
            return self._exec(fields)
        if operation == b"read":
            return [b"ok", _read_file(os.fsdecode(fields[0]), int(fields[1]))]
        if operation == b"clean":
            self._clean()
            return [b"ok"]
        if operation == b"write":
            _write_file(os.fsdecode(fields[0]), fields[1])
            return [b"ok"]
        if operation == b"listen":
            self._listen(int(fields[0]))
            return [b"ok"]
        return self._setup(fields)

    def _setup(self, fields: list[bytes]) -> list[bytes]:
        """Take memory [bytes], number of processes, ``NAME value`` limits, ``-``, ``path, data`` pairs."""
        divider = fields.index(b"-")
        self.memory_bytes, self.max_processes = int(fields[0]), int(fields[1])
        for limit in fields[2:divider]:
            name, value = limit.decode().split()
            kind = getattr(resource, name)
            ceiling = resource.getrlimit(kind)[1]
            wanted = int(value) if ceiling < 0 else min(int(value), ceiling)
            resource.setrlimit(kind, (wanted, wanted))
        os.chdir(WORKSPACE)
        disk = os.statvfs(WORKSPACE)
        if self.pristine is None:
            self.pristine = disk.f_bfree, disk.f_ffree
        self.max_files = max(MIN_FILES, disk.f_blocks * disk.f_frsize // DISK_BYTES_PER_FILE)
        made: set[str] = set()
        rest = fields[divider + 1 :]
        for path, data in zip(rest[::2], rest[1::2], strict=True):
            folder = os.path.dirname(os.fsdecode(path))
            if folder and folder not in made:
                os.makedirs(folder, exist_ok=True)
                made.add(folder)
            _write_file(os.fsdecode(path), data)
        return [b"ok"]

    def _clean(self) -> None:
        """Make the box as it was before its first setup, or raise.

        Processes, files and their attributes are all that a command can leave: kernel objects that
        outlive a process (shared memory, semaphores, queues, keys) are refused by the filter.
        """
        kill_all()
        self.reap()
        if self.num_files() > MAX_CLEAN_FILES:
            raise OSError(errno.E2BIG, f"more than {MAX_CLEAN_FILES} files")
        for root, mode in WRITABLE.items():
            for name in os.listxattr(root):
                os.removexattr(root, name)
            os.chmod(root, mode)
            _remove_contents(root)
        disk = os.statvfs(WORKSPACE)
        if (disk.f_bfree, disk.f_ffree) != self.pristine:
            raise OSError(errno.EBUSY, "something is left")

    def _listen(self, port: int) -> None:
        """Listen on the box's loopback, for the host, which gets the socket with the reply."""
        import socket  # boxes that serve nothing start without it

        with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
            self.handed_over = listener.detach()

    def _reply(self, frame: bytes) -> None:
        if self.handed_over >= 0:
            import socket

            with socket.socket(fileno=os.dup(self.fd)) as host:
                sent = socket.send_fds(host, [frame], [self.handed_over])
            os.close(self.handed_over)
            self.handed_over = -1
            frame = frame[sent:]
        _write_all(self.fd, frame)

    def _exec(self, fields: list[bytes]) -> list[bytes]:
        timeout_s, cap, stdin, argv = int(fields[0]) / 1000, int(fields[1]), fields[2], fields[3:]
        started = time.monotonic()
        try:
            job = Job(self, argv, stdin, cap)
        except FileNotFoundError:
            return _not_started(127, argv[0] + b": command not found", started)
        except OSError as error:
            reason = argv[0] + b": cannot be started: " + os.strerror(error.errno or 0).encode()
            return _not_started(126, reason, started)
        try:
            reason_killed = job.watch(started + timeout_s)
        finally:
            job.finish()
        if reason_killed:
            kill_all()
        self.reap(job)
        rc = b"" if reason_killed in ("time", "output") else b"%d" % (job.rc or 0)
        if reason_killed in self.allowed():
            rc = b"-%d" % signal.SIGKILL
            limit = self.allowed()[reason_killed]
            job.add("stderr", f"\nbox: killed, more than {limit} {reason_killed}\n".encode())
        spent = b"%d" % ((time.monotonic() - started) * 1e6)
        out, err = bytes(job.kept["stdout"]), bytes(job.kept["stderr"])
        return [b"ok", rc, reason_killed.encode(), b"%d" % job.num_dropped, spent, out, err]

    def allowed(self) -> dict[str, int]:
        """The limits that are watched, by the reason that a command is killed for."""
        return {
            "bytes of memory": self.memory_bytes,
            "processes": self.max_processes,
            "files": self.max_files,
        }

    def excess(self) -> str:
        """Return which watched limit the processes of the box exceed, or an empty string."""
        pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        if len(pids) > self.max_processes:
            return "processes"
        return "bytes of memory" if memory_above(self.memory_bytes, pids) else ""

    def num_files(self) -> int:
        """Files, folders and links that the writable places hold."""
        disk = os.statvfs(WORKSPACE)
        return disk.f_files - disk.f_ffree

    def reap(self, job: "Job | None" = None) -> None:
        """Collect every process that ended, and note the status of ``job``'s own."""
        try:  # noqa: SIM105 - contextlib would cost each box a millisecond and memory
            os.read(self.wake, CHUNK_BYTES)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if job is not None and pid == job.pid:
                job.rc = os.waitstatus_to_exitcode(status)

    def _receive(self) -> list[bytes]:
        while True:
            ready = select.select([self.fd, self.wake], [], [])[0]
            if self.wake in ready:
                self.reap()
            if self.fd in ready:
                break
        (length,) = U32.unpack(_read_exactly(self.fd, U32.size))
        if length > MAX_REQUEST_BYTES:
            os._exit(1)
        body = memoryview(_read_exactly(self.fd, length))
        fields, position = [], 0
        while position < length:
            start = position + U32.size
            position = start + U32.unpack_from(body, position)[0]
            fields.append(bytes(body[start:position]))
        return fields


class Job:
    """One running command and what it has written so far."""

    def __init__(self, server: Server, argv: list[bytes], stdin: bytes, cap: int) -> None:
        self.server = server
        self.kept = {"stdout": bytearray(), "stderr": bytearray()}
        self.cap = cap
        self.num_dropped = 0
        self.rc: int | None = None
        self.pending = memoryview(stdin)
        self.readers: dict[int, str] = {}
        self.stdin = -1
        os.chdir(WORKSPACE)
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(3 if stdin else 2)]
        child = [ends[2][0] if stdin else server.null, ends[0][1], ends[1][1]]
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(child)]
        try:
            self.pid = _spawn(argv, actions)
        except OSError:
            for end in (fd for pair in ends for fd in pair):
                os.close(end)
            raise
        for fd in child[0 if stdin else 1 :]:
            os.close(fd)
        self.readers = {ends[0][0]: "stdout", ends[1][0]: "stderr"}
        for fd in self.readers:
            os.set_blocking(fd, False)
        if stdin:
            self.stdin = ends[2][1]
            os.set_blocking(self.stdin, False)

    def watch(self, deadline: float) -> str:
        """Wait for the end; return why the command must be killed, or an empty string."""
        next_check = time.monotonic() + CHECK_S / 4
        num_files = self.server.num_files()
        while self.rc is None:
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now >= next_check:
                before, num_files = num_files, self.server.num_files()
                if num_files > max(before, self.server.max_files):
                    return "files"  # only while it grows, so that a later command can tidy up
                if excess := self.server.excess():
                    return excess
                next_check = time.monotonic() + CHECK_S
            self._wait(max(0.0, min(deadline, next_check) - now))
            if self.num_dropped > FLOOD_BYTES:
                return "output"
        return ""

    def _wait(self, seconds: float) -> None:
        waiting = [self.server.wake, self.server.fd, *self.readers]
        writers = [self.stdin] if self.stdin >= 0 else []
        ready, writable, _ = select.select(waiting, writers, [], seconds)
        for fd in list(self.readers):
            if fd in ready:
                self._take(fd)
        if writable:
            self._feed()
        if self.server.wake in ready:
            self.server.reap(self)
        if self.server.fd in ready:  # the host sends nothing while it waits: it is gone
            os._exit(0)

    def _take(self, fd: int) -> bool:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self.add(self.readers[fd], data)
            return True
        os.close(fd)
        del self.readers[fd]
        return False

    def add(self, stream: str, data: bytes) -> None:
        """Keep what fits under the cap that both streams share, count the rest."""
        room = self.cap - sum(map(len, self.kept.values()))
        self.kept[stream] += data[: max(0, room)]
        self.num_dropped += max(0, len(data) - max(0, room))

    def _feed(self) -> None:
        try:
            self.pending = self.pending[os.write(self.stdin, self.pending) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.pending = self.pending[:0]
        if not self.pending:
            os.close(self.stdin)
            self.stdin = -1

    def finish(self) -> None:
        """Take what is still in the pipes and close them; a background process may hold them open."""
        for fd in list(self.readers):
            budget = ENOUGH_FOR_THE_PIPE_BYTES // CHUNK_BYTES
            while budget and self._take(fd):
                budget -= 1
            if fd in self.readers:
                os.close(fd)
        if self.stdin >= 0:
            os.close(self.stdin)


def _spawn(argv: list[bytes], actions: list[tuple[int, int, int]]) -> int:
    """Start ``argv``; where leftovers of earlier commands used up the processes, end them and retry."""

    def spawn() -> int:
        return os.posix_spawnp(
            argv[0],
            argv,
            os.environ,
            file_actions=actions,
            setsid=True,
            setsigdef=IGNORED_SIGNALS,
        )

    try:
        pid = spawn()
    except BlockingIOError:
        kill_all()
        pid = spawn()
    try:  # under memory pressure the kernel shall choose the command, never this server
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
    return pid


def kill_all() -> None:
    """End every other process of the box, whatever session it hides in and signals it ignores."""
    while True:
        try:  # noqa: SIM105 - as above
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def memory_above(limit: int, pids: list[str]) -> bool:
    """Whether processes together hold more than ``limit`` bytes.

    Resident sizes are summed first, which is cheap and counts shared pages once per process; only
    when that is too much are the proportional sizes read, which count them once.
    """
    if _sum_kib(pids, "status", (b"RssAnon:", b"RssShmem:")) * 1024 <= limit:
        return False
    return _sum_kib(pids, "smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) * 1024 > limit


def _sum_kib(pids: list[str], file: str, keys: tuple[bytes, ...]) -> int:
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/{file}", "rb") as lines:
                total += sum(int(line.split()[1]) for line in lines if line.startswith(keys))
        except OSError:  # it ended meanwhile
            continue
    return total


def _read_file(path: str, max_bytes: int) -> bytes:
    fd = os.open(os.path.join(WORKSPACE, path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with open(fd, "rb") as file:
        _require_regular(fd, path)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"the file has more than {max_bytes} bytes", path)
    return data


def _write_file(path: str, data: bytes) -> None:
    path = os.path.join(WORKSPACE, path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, flags, 0o644)
    try:
        _require_regular(fd, path)
        os.ftruncate(fd, 0)
        _write_all(fd, data)
    finally:
        os.close(fd)


def _remove_contents(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                _remove_contents(entry.path)
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)


def _require_regular(fd: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = os.read(fd, min(num_bytes - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _pack(fields: list[bytes]) -> bytes:
    body = b"".join(part for field in fields for part in (U32.pack(len(field)), field))
    return U32.pack(len(body)) + body


def _not_started(rc: int, reason: bytes, started: float) -> list[bytes]:
    spent = b"%d" % ((time.monotonic() - started) * 1e6)
    return [b"ok", b"%d" % rc, b"", b"0", spent, b"", reason + b"\n"]


def _refused(number: int, error: BaseException) -> list[bytes]:
    return [b"error", b"%d" % number, str(error).encode("utf-8", "replace")]


def _nothing(*_: object) -> None:
    """Take SIGCHLD, so that it wakes the loop."""


def main() -> None:
    """Hide this process from the others of the box, drop every inherited descriptor, serve."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    fd = int(sys.argv[1])
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, fd)
    os.closerange(fd + 1, max(256, fd + 64))
    os.set_inheritable(fd, False)
    try:
        Server(fd).serve()
    except OSError:  # the socket broke: the host is gone
        os._exit(0)


if __name__ == "__main__":
    main()
