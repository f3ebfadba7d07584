"""Stage ``general_rl``: rule rewards over instructions and long context; GLM-5 report, section 3.4."""

from longarc.config.stages import RlConfig
from longarc.pipeline.rl import reinforce
from longarc.pipeline.workspace import Workspace


async def run(workspace: Workspace, stage: str, config: RlConfig) -> None:
    """Train on rewards that rules compute from the answer."""
    await reinforce(workspace, stage, config)
