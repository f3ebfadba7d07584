"""What a box sees: the options of its two bwrap calls.

::

    outer bwrap   the host's tree; one tmpfs of disk_bytes over SCRATCH, with folders in it
      inner bwrap   all namespaces, no capabilities, seccomp; a new root:
        /usr, parts of /etc    the host's, read-only
        /opt/...               what the spec shows of the host, read-only
        /workspace /tmp /home/agent /dev/shm    folders of the outer tmpfs: one quota for all
        /, /dev, /proc         read-only

bwrap binds only what its caller can see, hence the outer call: it gives the four writable places
one file system, so that one limit holds for their sum. The tmpfs exists in no mount table but the
box's, and is gone with its last process.
"""

import os
from collections.abc import Mapping

from longarc.envs.sandbox.host import Host

WORKSPACE = "/workspace"
HOME = "/home/agent"
BOX_UID = 1000
WRITABLE = {"workspace": WORKSPACE, "tmp": "/tmp", "home": HOME, "shm": "/dev/shm"}
SERVER_PATH = "/run/box/execd.pyc"
ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "nsswitch.conf",
    "mime.types",
    "localtime",
    "os-release",
    "debian_version",
)
MASKED_PROC = ("/proc/cmdline", "/proc/keys", "/proc/key-users", "/proc/sched_debug")
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup-try")
IDENTITY_FILES: Mapping[str, bytes] = {
    "/etc/passwd": b"root:x:0:0::/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\n",
    "/etc/group": b"root:x:0:\nagent:x:1000:\n",
    "/etc/hosts": b"127.0.0.1 localhost box\n",
}


def outer_options(host: Host, *, disk_bytes: int) -> list[str]:
    """Return the options of the call that makes the one writable file system."""
    options = ["--die-with-parent", "--dev-bind", "/", "/"]
    options += ["--size", str(disk_bytes), "--tmpfs", host.scratch, "--dir", f"{host.scratch}/none"]
    for name in WRITABLE:
        mode = "1777" if name in ("tmp", "shm") else "0755"
        options += ["--perms", mode, "--dir", f"{host.scratch}/{name}"]
    return options


def inner_options(
    host: Host, *, data_fds: Mapping[str, int], seccomp_fd: int, shown: Mapping[str, str]
) -> list[str]:
    """Return the options of the call that makes the box.

    Args:
        host: what the machine offers.
        data_fds: contents of the files that exist in the box only, by path.
        seccomp_fd: the filter program.
        shown: what else can be read of the host, by its path in the box.
    """
    options = [f"--unshare-{name}" for name in NAMESPACES]
    options += ["--disable-userns", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    options += ["--uid", str(BOX_UID), "--gid", str(BOX_UID), "--hostname", "box", "--clearenv"]
    for name, value in environment(host).items():
        options += ["--setenv", name, value]
    options += _read_only_tree(host)
    for path, fd in data_fds.items():
        options += ["--perms", "0444", "--ro-bind-data", str(fd), path]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for name, path in WRITABLE.items():
        options += ["--bind", f"{host.scratch}/{name}", path]
    options += ["--symlink", "../tmp", "/var/tmp"]
    if host.python_prefix is not None:  # after the writable places: it may lie under one of them
        options += ["--ro-bind", host.python_prefix, host.python_prefix]
    for path, source in shown.items():
        options += ["--ro-bind", source, path]
    for folder in host.hidden_folders:
        options += ["--ro-bind", f"{host.scratch}/none", folder]
    for path in MASKED_PROC:
        if os.path.exists(path):
            options += ["--ro-bind", "/dev/null", path]
    options += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*options, "--chdir", "/", "--seccomp", str(seccomp_fd)]


def environment(host: Host) -> dict[str, str]:
    """Return the whole environment of a box; nothing of the host's is passed on."""
    path = "/usr/local/bin:/usr/bin:/bin"
    if host.python_prefix is not None:
        path = f"{host.python_prefix}/bin:{path}"
    return {
        "PATH": path,
        "HOME": HOME,
        "USER": "agent",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PWD": WORKSPACE,
    }


def _read_only_tree(host: Host) -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    for name in ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return options
