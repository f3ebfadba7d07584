"""Runs a program in a box: its environment, its files, its prompt."""

from collections.abc import Mapping, Sequence
from typing import Final

from longarc.records.message import Json
from longarc.records.ports import ExecResult, Sandbox

MODEL: Final = "longarc"
"""What programs call the model; the gateway takes any name."""
HOME: Final = "/home/agent"


async def run_program(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    files: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout_s: float,
) -> ExecResult:
    """Run a program in the workspace of a box and wait for its end.

    Args:
        sandbox: the box.
        argv: the program and its arguments.
        env: what is added to the environment.
        files: written first; relative paths start at the workspace.
        stdin: the prompt, for programs that read it.
        timeout_s: how long it may take [seconds].
    """
    for path, text in (files or {}).items():
        await sandbox.write(path, text.encode())
    assignments = [f"{name}={value}" for name, value in env.items()]
    return await sandbox.exec(
        ["env", *assignments, *argv], stdin=stdin.encode(), timeout_s=timeout_s
    )


def text_of(output: bytes) -> str:
    """Return output as text; what is no UTF-8 is replaced."""
    return output.decode("utf-8", "replace")


def tail_of(output: bytes, num_chars: int = 2000) -> str:
    """Return the end of some output."""
    return text_of(output)[-num_chars:]


def facts_of(run: ExecResult) -> dict[str, Json]:
    """Return what is kept of a program's end."""
    return {
        "exit_status": run.rc,
        "stdout_tail": tail_of(run.stdout),
        "stderr_tail": tail_of(run.stderr),
        "program_s": round(run.wall_s, 3),
    }
