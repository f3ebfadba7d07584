"""Finds installed programs, and what a box has to show of the host for them to run.

::

    program = "..."                   what the recipe names
    .agents/claude-code/...           what ``make agent-claude-code`` installed
    PATH

A program is shown below ``/opt/agent``. Python programs run with a Python of the box where it has the same version,
else with their own, and never through PYTHONPATH or an activated environment: commands of the agent see neither.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longarc.errors import ConfigError

AGENTS = Path(".agents")
"""Where the Makefile installs agent programs, below the working directory."""
_ELF = b"\x7fELF"
_RUN = """
import runpy, site, sys
site.addsitedir("/opt/agent/packages")
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A program as a box has it."""

    argv: tuple[str, ...]
    """What starts it there."""
    shown: Mapping[str, str]
    """What it needs of the host; see ``SandboxSpec.shown``."""


def find(
    harness: str, names: Sequence[str], given: str | None, *, install: str, make: bool = True
) -> Path:
    """Return the path of a harness's program, links followed.

    Args:
        harness: its name.
        names: paths of the program below its folder in ``.agents``; the last part is its name on PATH.
        given: what the recipe or the command line says.
        install: the command that installs it.
        make: whether the Makefile has a target for it.

    Raises:
        ConfigError: it is not there; says how to get it.
    """
    if given is not None:
        if not os.access(given, os.X_OK) or os.path.isdir(given):
            raise ConfigError(
                f"program = {given!r} of harness {harness!r} is no program that can be run; install it with "
                f"`{install}`, or leave the option out to look in {AGENTS}/{harness} and on PATH"
            )
        return Path(given).resolve()
    for name in names:
        if os.access(AGENTS / harness / name, os.X_OK):
            return (AGENTS / harness / name).resolve()
    for name in names:
        if (found := shutil.which(Path(name).name)) is not None:
            return Path(found).resolve()
    wanted = " or ".join(sorted({repr(Path(name).name) for name in names}))
    by_make = f"`make agent-{harness}` in a checkout of LongArc, or " if make else ""
    raise ConfigError(
        f"harness {harness!r} needs the program {wanted}, which is neither in {AGENTS}/{harness} nor on PATH; install "
        f'it with {by_make}`{install}`, or name it with program = "/path/to/it"'
    )


def native(harness: str, program: Path, *, install: str) -> Installed:
    """Return a program that is one binary and needs nothing else.

    Raises:
        ConfigError: it is a script.
    """
    if not is_binary(program):
        raise ConfigError(
            f"{program} is a script, but harness {harness!r} starts the program's own binary; install a version that "
            f"has one: `{install}`"
        )
    place = f"/opt/agent/{program.stem}"
    return Installed(argv=(place,), shown={place: str(program)})


def is_binary(program: Path) -> bool:
    """Whether a file is a binary of Linux."""
    with program.open("rb") as file:
        return file.read(len(_ELF)) == _ELF


def python_module(harness: str, environment: Path, module: str, *, install: str) -> Installed:
    """Return a module of a virtual environment as a program; it is run as ``python -m``.

    Args:
        harness: for messages.
        environment: the folder of the virtual environment.
        module: what is run.
        install: the command that makes the environment.

    Raises:
        ConfigError: there is no such environment, or no Python that runs its packages can be shown.
    """
    python = environment / "bin/python"
    packages = next(iter(sorted(environment.glob("lib/python3.*/site-packages"))), None)
    if packages is None or not python.exists():
        raise ConfigError(
            f"{environment} is no virtual environment, in which harness {harness!r} runs; make one: `{install}`"
        )
    shown = {"/opt/agent/packages": str(packages)}
    version = packages.parent.name
    box_python = f"/usr/bin/{version}"
    if not os.access(box_python, os.X_OK):
        real = python.resolve()
        box_python = f"/opt/agent/python/bin/{real.name}"
        shown["/opt/agent/python"] = str(real.parent.parent)
    return Installed(argv=(box_python, "-I", "-c", _RUN, module), shown=shown)


def environment_of(harness: str, program: Path, *, install: str) -> Path:
    """Return the virtual environment that a script belongs to.

    Raises:
        ConfigError: it belongs to none.
    """
    folder = program.parent.parent
    if not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(
            f"{program} is not in a virtual environment, in which harness {harness!r} runs; make one: `{install}`"
        )
    return folder
