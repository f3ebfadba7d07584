"""Stage ``reasoning_rl``: GRPO with IcePop on tasks that need thinking; GLM-5 report, section 3.2."""

from longarc.config.stages import RlConfig
from longarc.pipeline.rl import reinforce
from longarc.pipeline.workspace import Workspace


async def run(workspace: Workspace, stage: str, config: RlConfig) -> None:
    """Train on verifiable answers; on-policy where ``loop.max_lag_steps`` is 0."""
    await reinforce(workspace, stage, config)
