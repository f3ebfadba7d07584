"""The command ``longarc``.

Every other module of this package is one command, found by its file: ``SUMMARY`` is its line in the
help, ``configure(parser)`` adds its arguments, ``run(arguments)`` returns the exit code. Modules
with a leading underscore are shared parts. A command imports what it needs inside ``run``, so that
``longarc --help`` is quick and needs no torch.
"""

import argparse
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Protocol, cast

import longarc
import longarc.cli
from longarc.cli._exit import ExitCode, code_of
from longarc.cli._extras import lacking
from longarc.errors import LongArcError, ResourceError
from longarc.runs.disk import NO_ROOM

_EPILOG = """exit codes:
  0    done
  1    a check or an audit found something, or the engine failed
  2    the recipe, an option or the command line is wrong
  3    the machine lacks something: disk, memory, a tool, a permission
  4    data is damaged, from a newer version, or breaks a contract
  130  interrupted; a run can be continued with --resume
"""


class Command(Protocol):
    """What a module of this package provides."""

    SUMMARY: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; return the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never a traceback for what went wrong on purpose."""
    # Before torch is loaded: a thread that waits for the others must sleep. Spinning beside one other busy
    # process on the same cores makes a training step ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = build_parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    command = cast(Command, arguments.command)
    try:
        code = int(command.run(arguments))
        sys.stdout.flush()
        return code
    except LongArcError as error:
        return _fail(error, is_verbose=arguments.verbose)
    except ModuleNotFoundError as error:
        lack = lacking(error)
        if lack is None:
            raise
        return _fail(lack, is_verbose=arguments.verbose)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        _stop_printing()
        return ExitCode.OK
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        if error.filename is None:
            _stop_printing()
        lack = ResourceError(
            f"cannot write {error.filename or 'the output or a file'}: {error.strerror}; free some space or give "
            f"another place"
        )
        return _fail(lack, is_verbose=arguments.verbose)


def _stop_printing() -> None:
    """Let what Python still flushes at its end go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: LongArcError, *, is_verbose: bool) -> ExitCode:
    if is_verbose:
        traceback.print_exc()
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code_of(error)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every command of this package."""
    parser = argparse.ArgumentParser(
        prog="longarc",
        description="Train long-horizon agentic, reasoning and coding models with the GLM-5 recipe.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"longarc {longarc.__version__}")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log more, and show where an error comes from"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in _commands():
        description = command.__doc__
        child = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        child.set_defaults(command=command)
        command.configure(child)
    return parser


def _commands() -> Iterator[tuple[str, Command]]:
    names = [module.name for module in pkgutil.iter_modules(longarc.cli.__path__)]
    for name in sorted(set(names) - {"main"}):
        if not name.startswith("_"):
            yield name.replace("_", "-"), cast(Command, import_module(f"longarc.cli.{name}"))


if __name__ == "__main__":
    sys.exit(main())
