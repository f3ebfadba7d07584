"""Stage ``value_pretrain``: a critic learns what the policy earns, before it gives advantages; VAPO, SAO."""

from longarc.config.critic import ValuePretrainConfig
from longarc.pipeline.rl import reinforce
from longarc.pipeline.workspace import Workspace


async def run(workspace: Workspace, stage: str, config: ValuePretrainConfig) -> None:
    """Sample from a policy that stays as it is, and train a critic on what its rollouts earn."""
    await reinforce(workspace, stage, config)
