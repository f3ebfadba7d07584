"""Runs one agent program with a checkpoint of a run behind it."""

from longarc.config.rollout import RolloutConfig
from longarc.errors import ConfigError, boundary
from longarc.pipeline.agent import STAGE, AgentRun, AgentSettings, run_program_on_task
from longarc.pipeline.engines import served_context_tokens
from longarc.pipeline.rl import sampling_of, serving
from longarc.pipeline.serve import served_stage
from longarc.pipeline.workspace import Workspace
from longarc.records.outcome import Disposition


async def run_on_checkpoint(
    workspace: Workspace, settings: AgentSettings, *, stage: str | None
) -> AgentRun:
    """Run a program with a checkpoint of a run behind it; the trajectory goes into the run's ledger.

    Args:
        workspace: the run.
        settings: program and task.
        stage: whose final checkpoint; None takes the newest.

    Raises:
        ConfigError: no stage is finished, the program is not installed, or the model cannot do so many tokens.
        ResourceError: this machine cannot run sandboxes.
    """
    loaded = workspace.load(workspace.final(served_stage(workspace, stage)))
    room = served_context_tokens(settings.max_context_tokens, loaded.model.config)
    with boundary(ConfigError, f"a session of {room} tokens (--max-context-tokens)"):
        rollout = RolloutConfig(
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            max_context_tokens=room,
        )
    number = 0
    while workspace.ledger.row(f"{STAGE}/{number}") is not None:
        number += 1
    async with serving(
        workspace,
        loaded,
        rollout,
        policy_version=loaded.manifest.policy_version,
        num_threads=workspace.recipe.threads,
    ) as served:
        done = await run_program_on_task(
            served.sessions,
            served.sandboxes,
            settings,
            name=f"{STAGE}/{number}",
            sampling=sampling_of(rollout, served.gateway),
            max_context_tokens=room,
            policy_version=loaded.manifest.policy_version,
        )
    workspace.ledger.complete(done.trajectory, disposition=Disposition.COLLECTED)
    return done
