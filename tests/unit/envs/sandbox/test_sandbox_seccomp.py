"""The filter, executed by a small interpreter for both architectures, and its numbers against headers."""

import re
import struct
from pathlib import Path

import pytest

from longarc.envs.sandbox.seccomp import (
    ABSENT,
    CLONE,
    DENIED,
    IOCTL,
    IOPRIO_SET,
    PRLIMIT64,
    SCHEDULING,
    SETPRIORITY,
    SOCKET,
    seccomp_program,
)
from longarc.errors import ResourceError

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def errno(code):
    return 0x00050000 | code


def run(program, *, number, arch, arguments=(0, 0)):
    """Execute classic BPF over one seccomp_data record and return the verdict."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator, counter = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, counter * 8)
        counter += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x06:
                return value
            case _:
                test = {
                    0x15: accumulator == value,
                    0x35: accumulator >= value,
                    0x45: bool(accumulator & value),
                }[code]
                counter += if_true if test else if_false


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request):
    return request.param


def index(machine):
    return 0 if machine == "x86_64" else 1


def test_listed_calls_are_refused_and_ordinary_ones_pass(machine):
    program = seccomp_program(machine)
    for calls, code in ((DENIED, 1), (ABSENT, 38)):
        for name, numbers in calls.items():
            if (number := numbers[index(machine)]) is not None:
                verdict = run(program, number=number, arch=AUDIT[machine])
                assert verdict == errno(code), name
    read, openat, execve = {"x86_64": (0, 257, 59), "aarch64": (63, 56, 221)}[machine]
    for number in (read, openat, execve):
        assert run(program, number=number, arch=AUDIT[machine]) == ALLOW


def test_calls_of_another_architecture_end_the_process(machine):
    program = seccomp_program(machine)
    assert run(program, number=0, arch=0x40000003) == KILL


def test_the_x32_numbers_of_x86_64_do_not_exist():
    program = seccomp_program("x86_64")
    assert run(program, number=0x40000000 | 101, arch=AUDIT["x86_64"]) == errno(38)


@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("clone", (0x01200011, 0), ALLOW),
        ("clone", (0x003D0F00, 0), ALLOW),
        ("clone", (0x10000011, 0), errno(1)),
        ("clone", (0x00020011, 0), errno(1)),
        ("clone", (0x40000011, 0), errno(1)),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), errno(1)),
        ("ioctl", (0, 0x541C), errno(1)),
        ("ioctl", (0, 0x1_0000_5412), errno(1)),
        ("socket", (1, 1), ALLOW),
        ("socket", (2, 1), ALLOW),
        ("socket", (10, 1), ALLOW),
        ("socket", (16, 3), errno(97)),
        ("socket", (40, 1), errno(97)),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 0), errno(1)),
        ("sched_setaffinity", (0, 8), ALLOW),
        ("sched_setaffinity", (7, 8), ALLOW),
        ("sched_setaffinity", (1, 8), errno(1)),
        ("setpriority", (0, 0), ALLOW),
        ("setpriority", (0, 1), errno(1)),
        ("setpriority", (2, 0), errno(1)),
        ("ioprio_set", (1, 0), ALLOW),
        ("ioprio_set", (1, 1), errno(1)),
        ("ioprio_set", (3, 0), errno(1)),
    ],
)
def test_some_calls_depend_on_an_argument(machine, call, arguments, verdict):
    number = {
        "clone": (56, 220),
        "ioctl": (16, 29),
        "socket": (41, 198),
        "prlimit64": (302, 261),
        "sched_setaffinity": (203, 122),
        "setpriority": (141, 140),
        "ioprio_set": (251, 30),
    }[call][index(machine)]
    program = seccomp_program(machine)
    assert run(program, number=number, arch=AUDIT[machine], arguments=arguments) == verdict


def test_the_numbers_are_those_of_the_kernel_headers(machine):
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    text = HEADERS[machine].read_text()
    known = {name: int(value) for name, value in re.findall(r"#define __NR_(\w+)\s+(\d+)", text)}
    rules = {"setpriority": SETPRIORITY, "ioprio_set": IOPRIO_SET, "clone": CLONE, "ioctl": IOCTL}
    rules |= {"socket": SOCKET, "prlimit64": PRLIMIT64}
    for name, numbers in {**DENIED, **ABSENT, **SCHEDULING, **rules}.items():
        if numbers[index(machine)] is not None and name in known:
            assert known[name] == numbers[index(machine)], name
    assert len([name for name in {**DENIED, **ABSENT} if name in known]) > 50


def test_an_unknown_architecture_is_an_error_with_its_name():
    with pytest.raises(ResourceError, match="'riscv64'; known: x86_64, aarch64"):
        seccomp_program("riscv64")
    assert seccomp_program("arm64") == seccomp_program("aarch64")


def test_no_jump_leaves_the_program(machine):
    program = seccomp_program(machine)
    num_ops = len(program) // 8
    assert num_ops < 4096  # the kernel's limit
    for position in range(num_ops):
        code, if_true, if_false, _ = struct.unpack_from("<HBBI", program, position * 8)
        if code & 7 == 5:
            assert position + 1 + max(if_true, if_false) < num_ops
