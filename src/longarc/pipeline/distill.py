"""Stage ``distill``: the last one; every earlier stage teaches what it was best at. GLM-5 report, 3.5."""

from longarc.config.stages import DistillConfig
from longarc.pipeline.rl import reinforce
from longarc.pipeline.workspace import Workspace


async def run(workspace: Workspace, stage: str, config: DistillConfig) -> None:
    """Sample from the student; the teacher of each prompt's family scores every token."""
    await reinforce(workspace, stage, config)
