"""The ``bash`` tool: one shell command in the sandbox of the episode."""

from collections.abc import Mapping
from typing import Final

from longarc.envs.tool_loop import ToolCallError, ToolFunction
from longarc.errors import RolloutError
from longarc.records.message import Json, ToolSpec
from longarc.records.ports import ExecResult, Sandbox

BASH: Final = ToolSpec(
    name="bash",
    description="Run a command.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
)
"""The description is short on purpose: every rollout pays for it in prompt tokens."""


def bash_tool(sandbox: Sandbox, *, timeout_s: float, max_output_chars: int) -> ToolFunction:
    """Return the function that runs ``command`` in ``sandbox``.

    A command that hangs is the policy's own doing: it is told so and the episode goes on. A sandbox
    that reports its own failure raises ``RolloutError``.
    """

    async def bash(arguments: Mapping[str, Json]) -> str:
        command = arguments.get("command")
        if not isinstance(command, str) or "\0" in command:
            raise ToolCallError("command must be text")
        result = await sandbox.exec(["bash", "-c", command], timeout_s=timeout_s)
        if result.failure is not None:
            detail = result.stderr.decode(errors="replace")[:200]
            raise RolloutError(f"the sandbox failed under {command!r}: {detail or result.failure}")
        return observation(result, timeout_s=timeout_s, max_output_chars=max_output_chars)

    return bash


def observation(result: ExecResult, *, timeout_s: float, max_output_chars: int) -> str:
    """What the policy reads of a command: its output, clipped, and what the output does not say."""
    text = (result.stdout + result.stderr).decode(errors="replace").rstrip("\n")
    if len(text) > max_output_chars:
        text = text[:max_output_chars] + "\n[cut]"
    elif result.num_dropped_bytes:
        text += "\n[cut]"
    if result.timed_out:
        return f"{text}\ntimed out after {timeout_s:g} s".lstrip("\n")
    if text:
        return text
    return "[empty]" if result.rc == 0 else f"[exit {result.rc}]"
