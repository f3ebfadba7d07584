"""The smallest environment: one question, one answer, no tools."""

from dataclasses import dataclass

from longarc.envs.tool_loop import run_tool_loop
from longarc.records.ports import PolicyClient
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Shows the task's messages and takes the first answer."""

    task: Task

    async def run(self, policy: PolicyClient) -> EpisodeResult:
        """Ask once; an answer that calls a tool, which this task does not have, ends without one."""
        return await run_tool_loop(policy, self.task, {}, max_turns=1)
