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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longarc.errors import ConfigError

AGENTS = Path(".agents")
"""Where the Makefile installs agent programs, below the working directory."""
_ELF = b"\x7fELF"
PLACE = "/opt/agent"
"""Where a box shows the program."""
_RUN = f"""
import runpy, site, sys
site.addsitedir("{PLACE}/packages")
sys.argv = sys.argv[1:]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A program as a box has it."""

    argv: tuple[str, ...]
    """What starts it there."""
    shown: Mapping[str, str]
    """What it needs of the host; see ``SandboxSpec.shown``."""


def find(harness: str, local: str, given: str | None, *, on_path: str | None, install: str) -> Path:
    """Return the path of a harness's program, links not followed.

    Args:
        harness: its name.
        local: path of the program below its folder in ``.agents``.
        given: what the recipe or the command line says.
        on_path: its name on PATH; None where a program of that name need not be it.
        install: the command that installs it.

    Raises:
        ConfigError: it is not there; says how to get it.
    """
    if given is not None:
        if not os.access(given, os.X_OK) or os.path.isdir(given):
            raise ConfigError(
                f"program = {given!r} of harness {harness!r} is no program that can be run; install it with "
                f"`{install}`, or leave the option out to look in {AGENTS}/{harness} and on PATH"
            )
        return Path(given).absolute()
    if os.access(AGENTS / harness / local, os.X_OK):
        return (AGENTS / harness / local).absolute()
    if on_path is not None and (found := shutil.which(on_path)) is not None:
        return Path(found).absolute()
    raise ConfigError(
        f"harness {harness!r} needs {AGENTS / harness / local}{f', or {on_path} on PATH' if on_path else ''}, and it is "
        f"not there: install it with `make agent-{harness}` in a checkout of LongArc, or with `{install}`; or name it "
        f'with program = "/path/to/it"'
    )


def native(harness: str, program: Path, *, install: str) -> Installed:
    """Return a program that is one binary and needs nothing else.

    Raises:
        ConfigError: it is a script.
    """
    binary = program.resolve()
    if not is_binary(binary):
        raise ConfigError(
            f"{program} is a script, but harness {harness!r} starts the program's own binary; install a version that "
            f"has one: `{install}`"
        )
    place = f"{PLACE}/{binary.stem}"
    return Installed(argv=(place,), shown={place: str(binary)})


def is_binary(program: Path) -> bool:
    """Whether a file is a binary of Linux."""
    with program.open("rb") as file:
        return file.read(len(_ELF)) == _ELF


def python(harness: str, environment: Path, *, install: str) -> Installed:
    """Return a Python with the packages of a virtual environment; what follows is a module, or a path that ends in .py.

    Args:
        harness: for messages.
        environment: the folder of the virtual environment.
        install: the command that makes the environment.

    Raises:
        ConfigError: there is no such environment, or no Python that runs its packages can be shown.
    """
    own = environment / "bin/python"
    packages = next(iter(sorted(environment.glob("lib/python3.*/site-packages"))), None)
    if packages is None or not own.exists():
        raise ConfigError(
            f"{environment} is no virtual environment, in which harness {harness!r} runs; make one: `{install}`"
        )
    shown = {f"{PLACE}/packages": str(packages.resolve())}
    in_box = f"/usr/bin/{packages.parent.name}"
    if not os.access(in_box, os.X_OK):
        real = own.resolve()
        in_box = f"{PLACE}/python/bin/{real.name}"
        shown[f"{PLACE}/python"] = str(real.parent.parent)
    return Installed(argv=(in_box, "-I", "-c", _RUN), shown=shown)


def environment_of(harness: str, program: Path, *, install: str) -> Path:
    """Return the virtual environment that a script belongs to.

    Raises:
        ConfigError: it belongs to none.
    """
    for script in (program, program.resolve()):
        if (script.parent.parent / "pyvenv.cfg").is_file():
            return script.parent.parent
    raise ConfigError(
        f"{program} is not in a virtual environment, in which harness {harness!r} runs; make one: `{install}`"
    )
