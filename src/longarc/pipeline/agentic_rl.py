"""Stage ``agentic_rl``: asynchronous RL with tools, double-sided importance sampling; GLM-5 report, 4.1."""

from longarc.config.stages import RlConfig
from longarc.pipeline.rl import reinforce
from longarc.pipeline.workspace import Workspace


async def run(workspace: Workspace, stage: str, config: RlConfig) -> None:
    """Train on whole rollouts of an agent in its sandbox, while the next ones are already running."""
    await reinforce(workspace, stage, config)
