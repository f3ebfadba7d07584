"""The system calls a box may not make, as a classic BPF program for ``bwrap --seccomp``.

::

    architecture wrong -> kill      x32 number -> ENOSYS
    number in DENIED   -> errno     clone with a namespace flag -> EPERM, other clone -> allow
    socket family not AF_UNIX, AF_INET, AF_INET6 -> EAFNOSUPPORT      ioctl TIOCSTI, TIOCLINUX -> EPERM
    prlimit64 on another process -> EPERM
    priority, scheduler or affinity of process 1, or of a group or user -> EPERM
    anything else -> allow

Namespaces already confine a box; this list closes what they do not cover: families that ignore the
network namespace (AF_VSOCK, netlink), the kernel's larger attack surfaces (io_uring, bpf, perf,
userfaultfd, keyrings), memory that no process limit counts (memfd, System V shared memory), and
inotify, which on the shared /usr tells one box what another one opens. Process 1 enforces the time
limits; an agent that could make it slow could turn its own time-outs into crashes of the environment.

Source: numbers from the Linux system call tables (``arch/x86/entry/syscalls``, ``asm-generic``).
"""

import platform
import struct
from typing import NamedTuple

from longarc.errors import ResourceError

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENT_0, ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in ``struct seccomp_data`` [bytes]; arguments by their low half on little-endian machines."""
X32_BIT = 0x40000000
NAMESPACE_FLAGS = 0x7E020080
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, NEWNS and NEWTIME."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
TIOCSTI, TIOCLINUX = 0x5412, 0x541C


class Numbers(NamedTuple):
    """One system call's number per architecture; None where the architecture lacks it."""

    x86_64: int | None
    aarch64: int | None


AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

CLONE, CLONE3 = Numbers(56, 220), Numbers(435, 435)
IOCTL, SOCKET, PRLIMIT64 = Numbers(16, 29), Numbers(41, 198), Numbers(302, 261)
SETPRIORITY, IOPRIO_SET = Numbers(141, 140), Numbers(251, 30)
SCHEDULING = {
    "sched_setparam": Numbers(142, 118),
    "sched_setscheduler": Numbers(144, 119),
    "sched_setaffinity": Numbers(203, 122),
    "sched_setattr": Numbers(314, 274),
}
PRIO_PROCESS, IOPRIO_WHO_PROCESS = 0, 1
SERVER_PID = 1

DENIED = {
    "ptrace": Numbers(101, 117),
    "process_vm_readv": Numbers(310, 270),
    "process_vm_writev": Numbers(311, 271),
    "kcmp": Numbers(312, 272),
    "pidfd_getfd": Numbers(438, 438),
    "add_key": Numbers(248, 217),
    "request_key": Numbers(249, 218),
    "keyctl": Numbers(250, 219),
    "bpf": Numbers(321, 280),
    "perf_event_open": Numbers(298, 241),
    "unshare": Numbers(272, 97),
    "setns": Numbers(308, 268),
    "mount": Numbers(165, 40),
    "umount2": Numbers(166, 39),
    "pivot_root": Numbers(155, 41),
    "chroot": Numbers(161, 51),
    "open_tree": Numbers(428, 428),
    "move_mount": Numbers(429, 429),
    "fsopen": Numbers(430, 430),
    "fsconfig": Numbers(431, 431),
    "fsmount": Numbers(432, 432),
    "fspick": Numbers(433, 433),
    "mount_setattr": Numbers(442, 442),
    "kexec_load": Numbers(246, 104),
    "kexec_file_load": Numbers(320, 294),
    "init_module": Numbers(175, 105),
    "finit_module": Numbers(313, 273),
    "delete_module": Numbers(176, 106),
    "swapon": Numbers(167, 224),
    "swapoff": Numbers(168, 225),
    "reboot": Numbers(169, 142),
    "sethostname": Numbers(170, 161),
    "setdomainname": Numbers(171, 162),
    "settimeofday": Numbers(164, 170),
    "clock_settime": Numbers(227, 112),
    "adjtimex": Numbers(159, 171),
    "clock_adjtime": Numbers(305, 266),
    "syslog": Numbers(103, 116),
    "acct": Numbers(163, 89),
    "quotactl": Numbers(179, 60),
    "quotactl_fd": Numbers(443, 443),
    "nfsservctl": Numbers(180, 42),
    "name_to_handle_at": Numbers(303, 264),
    "open_by_handle_at": Numbers(304, 265),
    "iopl": Numbers(172, None),
    "ioperm": Numbers(173, None),
    "modify_ldt": Numbers(154, None),
    "uselib": Numbers(134, None),
    "ustat": Numbers(136, None),
    "sysfs": Numbers(139, None),
    "vhangup": Numbers(153, 58),
    "migrate_pages": Numbers(256, 238),
    "move_pages": Numbers(279, 239),
    "fanotify_init": Numbers(300, 262),
}
"""Refused with EPERM."""

ABSENT = {
    "clone3": CLONE3,
    "io_uring_setup": Numbers(425, 425),
    "io_uring_enter": Numbers(426, 426),
    "io_uring_register": Numbers(427, 427),
    "userfaultfd": Numbers(323, 282),
    "memfd_create": Numbers(319, 279),
    "memfd_secret": Numbers(447, 447),
    "shmget": Numbers(29, 194),
    "semget": Numbers(64, 190),
    "msgget": Numbers(68, 186),
    "mq_open": Numbers(240, 180),
    "inotify_init": Numbers(253, None),
    "inotify_init1": Numbers(294, 26),
}
"""Refused with ENOSYS, so that libraries take the path they have for older kernels."""


def seccomp_program(machine: str | None = None) -> bytes:
    """Return the filter as an array of ``struct sock_filter`` for ``machine`` (default: this one).

    Raises:
        ResourceError: no table for the architecture.
    """
    machine = machine or platform.machine()
    machine = {"amd64": "x86_64", "AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if machine not in AUDIT_ARCHITECTURES:
        raise ResourceError(
            f"no system call filter for the architecture {machine!r}; known: "
            f"{', '.join(AUDIT_ARCHITECTURES)}; run the environments on one of these"
        )

    def number(call: Numbers) -> int | None:
        return call.x86_64 if machine == "x86_64" else call.aarch64

    program = [
        _op(LOAD, ARCHITECTURE),
        _op(JUMP_EQUAL, AUDIT_ARCHITECTURES[machine], 1, 0),
        _op(RETURN, KILL),
        _op(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        program += [_op(JUMP_AT_LEAST, X32_BIT, 0, 1), _op(RETURN, ERRNO | ENOSYS)]
    for calls, code in ((DENIED, EPERM), (ABSENT, ENOSYS)):
        for call in calls.values():
            if (value := number(call)) is not None:
                program += [_op(JUMP_EQUAL, value, 0, 1), _op(RETURN, ERRNO | code)]
    program += _argument_rule(number(CLONE), ARGUMENT_0, _no_bit(NAMESPACE_FLAGS))
    program += _argument_rule(number(IOCTL), ARGUMENT_1, _not_in(TIOCSTI, TIOCLINUX))
    program += _argument_rule(
        number(SOCKET), ARGUMENT_0, _only(AF_UNIX, AF_INET, AF_INET6, code=EAFNOSUPPORT)
    )
    program += _argument_rule(number(PRLIMIT64), ARGUMENT_0, _only(0, code=EPERM))
    for call in SCHEDULING.values():
        program += _argument_rule(number(call), ARGUMENT_0, _not_in(SERVER_PID))
    for call, kind in ((SETPRIORITY, PRIO_PROCESS), (IOPRIO_SET, IOPRIO_WHO_PROCESS)):
        other = _not_in(SERVER_PID)
        rule = [_op(JUMP_EQUAL, kind, 1, 0), _op(RETURN, ERRNO | EPERM), _op(LOAD, ARGUMENT_1)]
        program += _argument_rule(number(call), ARGUMENT_0, rule + other)
    return b"".join([*program, _op(RETURN, ALLOW)])


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one ``struct sock_filter``; jumps count instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _argument_rule(number: int | None, offset: int, rule: list[bytes]) -> list[bytes]:
    """Apply ``rule``, which ends in RETURN, to one argument of one system call."""
    assert number is not None
    return [_op(JUMP_EQUAL, number, 0, len(rule) + 1), _op(LOAD, offset), *rule]


def _no_bit(bits: int) -> list[bytes]:
    return [_op(JUMP_ANY_BIT, bits, 0, 1), _op(RETURN, ERRNO | EPERM), _op(RETURN, ALLOW)]


def _not_in(*values: int) -> list[bytes]:
    tests = [_op(JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
    return [*tests, _op(RETURN, ALLOW), _op(RETURN, ERRNO | EPERM)]


def _only(*values: int, code: int) -> list[bytes]:
    tests = [_op(JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
    return [*tests, _op(RETURN, ERRNO | code), _op(RETURN, ALLOW)]
