"""Exit codes of every command."""

from enum import IntEnum

from longarc.errors import ConfigError, ContractError, LongArcError, ResourceError


class ExitCode(IntEnum):
    """What a command says to the shell."""

    OK = 0
    FAILED = 1
    """A check or an audit found something, or the engine failed."""
    USAGE = 2
    """The recipe, an option or the command line is wrong."""
    RESOURCE = 3
    """The machine lacks something: disk, memory, a tool, a permission."""
    CORRUPT = 4
    """Data is damaged, from a newer version, or breaks a contract."""
    INTERRUPTED = 130
    """Ctrl-C; a run can be resumed."""


def code_of(error: LongArcError) -> ExitCode:
    """Return the exit code of an error."""
    match error:
        case ConfigError():
            return ExitCode.USAGE
        case ResourceError():
            return ExitCode.RESOURCE
        case ContractError():
            return ExitCode.CORRUPT
        case _:
            return ExitCode.FAILED
