"""What value_pretrain, reasoning_rl, agentic_rl, general_rl and distill share: the asynchronous loop with real workers.

::

    orchestrator -- sessions --> gateway --> engine (this process, one thread), or router --> engine servers
         |  \\-- boxes --> sandbox
         \\-- batches --> trainer (this process and those that share gradients, or one of its own) --weights--> engine

A resumed stage loads its newest checkpoint, takes the steps that the ledger recorded after it again,
and must arrive at the recorded weights bit for bit before anything new is sampled.
"""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import servers_of
from longarc.config.rollout import RolloutConfig, takes_turns
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.errors import ContractError
from longarc.gateway.core import Gateway
from longarc.gateway.rollouts import RolloutSessions
from longarc.orchestrator.loop import run_stage
from longarc.orchestrator.mixture import FamilyShare
from longarc.orchestrator.stage import StageSpec, Workers
from longarc.pipeline.engine_clients import engine_client
from longarc.pipeline.engines import embedded_engine, engine_servers
from longarc.pipeline.trainer_factory import SamplingStage, TrainerSpec, build_trainer, trainer_spec
from longarc.pipeline.workspace import Interrupted, Loaded, Workspace
from longarc.records.batch import StepReport
from longarc.records.ports import Engine, Trainer
from longarc.records.sampling import Sampling
from longarc.runs.checkpoint import list_checkpoints, read_manifest
from longarc.runs.files import make_directory
from longarc.trainer.process import ProcessTrainer


async def reinforce(
    workspace: Workspace,
    stage: str,
    config: SamplingStage,
) -> None:
    """Run a stage of RL, distillation or value pre-training to its end, or continue it.

    Args:
        workspace: the run.
        stage: name of the stage.
        config: its settings.

    Raises:
        Interrupted: the user asked to stop; the stage is saved.
    """
    directory = workspace.run.stage(stage)
    resumed = directory.latest()
    loaded = workspace.load(workspace.input_checkpoint(stage))
    publish_directory = directory.path / "published"
    make_directory(publish_directory)
    spec = trainer_spec(
        workspace.recipe,
        config,
        input_checkpoint=loaded.path,
        resume_checkpoint=resumed,
        publish_directory=publish_directory,
        tokenizer=workspace.tokenizer_path,
        final=workspace.final,
    )
    async with _trainer(workspace, spec, config) as trainer:
        version = await _catch_up(workspace, stage, trainer, resumed)
        saver = _Saver(workspace, stage, config, trainer, loaded)
        recipe = workspace.recipe
        async with serving(
            workspace,
            loaded,
            config.rollout,
            policy_version=version,
            num_threads=recipe.threads if takes_turns(config) else recipe.engine.num_threads,
            at_servers=bool(servers_of(recipe.engine)),
        ) as serve:
            families = workspace.families(config.tasks)
            result = await run_stage(
                config.loop,
                StageSpec(
                    stage=stage,
                    families=[
                        FamilyShare(family=family, share=config.tasks[name].share_frac)
                        for name, family in families.items()
                    ],
                    sampling=sampling_of(config.rollout, serve.gateway),
                    max_context_tokens=config.rollout.max_context_tokens,
                    run_seed=workspace.recipe.seed,
                ),
                Workers(
                    trainer=trainer,
                    engine=serve.engine,
                    sessions=serve.sessions,
                    sandboxes=serve.sandboxes,
                    ledger=workspace.ledger,
                    sinks=[workspace.sink],
                    progress=workspace.progress,
                ),
                policy_version=version,
                on_step=saver,
                stop=workspace.stop,
            )
        final = await saver.save(result.num_steps, result.policy_version)
    if not result.is_complete:
        raise Interrupted
    directory.set_final(final)


class Serving:
    """An engine, its gateway and boxes for the tools."""

    def __init__(self, engine: Engine, gateway: Gateway, sandboxes: BwrapBackend) -> None:
        self.engine = engine
        self.gateway = gateway
        self.sessions = RolloutSessions(gateway)
        self.sandboxes = sandboxes


@contextlib.asynccontextmanager
async def serving(
    workspace: Workspace,
    loaded: Loaded,
    rollout: RolloutConfig,
    *,
    policy_version: int,
    num_threads: int,
    logs_turns: bool = False,
    at_servers: bool = False,
) -> AsyncIterator[Serving]:
    """Serve a checkpoint for rollouts until the block ends.

    Args:
        workspace: the run.
        loaded: the checkpoint.
        rollout: how it is sampled.
        policy_version: version [optimizer steps] of the weights the engine starts with.
        num_threads: compute threads of the engine; never more than there are cores, which changes no number.
        logs_turns: whether each turn is recorded before it is answered, so that a client can go on after a
            crash. A rollout of ours cannot (its agent loop dies with the process and is run again), so
            only served sessions log theirs.
        at_servers: whether the recipe's engine servers sample, and no engine in this process.
    """
    config = workspace.recipe.engine
    if not isinstance(config, EngineConfig):
        opening: AbstractAsyncContextManager[Engine] = engine_client(
            workspace, config, workspace.load(loaded.path), rollout, policy_version=policy_version
        )
    elif at_servers:
        opening = engine_servers(
            config,
            loaded,
            max_context_tokens=rollout.max_context_tokens,
            routing_replay=rollout.routing_replay,
            seed=workspace.recipe.seed,
        )
    else:
        opening = embedded_engine(
            workspace.load(loaded.path),
            config,
            max_context_tokens=rollout.max_context_tokens,
            policy_version=policy_version,
            num_threads=num_threads,
            seed=workspace.recipe.seed,
            tokenizer=workspace.tokenizer(),
            records_routing=rollout.routing_replay,
        )
    sandboxes = BwrapBackend(max_idle=workspace.recipe.engine.max_running)
    try:
        async with opening as engine:
            yield Serving(
                engine,
                Gateway(
                    engine,
                    workspace.chat_format(),
                    turn_log=workspace.ledger.append_turn if logs_turns else None,
                ),
                sandboxes,
            )
    finally:
        await sandboxes.close()


def sampling_of(rollout: RolloutConfig, gateway: Gateway) -> Sampling:
    """Return how a stage samples; each rollout adds its own seed."""
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        returns_kept_ids=True,
        returns_routing_from=None if rollout.routing_replay == "none" else 0,
        on_update=rollout.on_update,
        stop_ids=gateway.chat_format.stop_ids,
    )


@contextlib.asynccontextmanager
async def _trainer(
    workspace: Workspace, spec: TrainerSpec, config: SamplingStage
) -> AsyncIterator[Trainer]:
    if not config.trainer_process:
        gradients = workspace.gradients.open if takes_turns(config) else None
        yield build_trainer(spec, gradients=gradients)
        return
    process = await ProcessTrainer.start(partial(build_trainer, spec), num_threads=spec.num_threads)
    try:
        yield process
    finally:
        await process.close()


async def _catch_up(
    workspace: Workspace, stage: str, trainer: Trainer, resumed: Path | None
) -> int:
    """Take the steps again that the ledger has and the checkpoint has not; return the version reached."""
    rows = workspace.ledger.steps(stage)
    if resumed is not None:
        manifest = read_manifest(resumed)
        step, version = manifest.step, manifest.policy_version
    else:
        step = 0
        version = read_manifest(workspace.input_checkpoint(stage)).policy_version
    for row in rows[step:]:
        report = await trainer.step(workspace.ledger.batch(stage, row.step))
        if report.weights_sha256 != row.weights_sha256:
            raise ContractError(
                f"stage {stage!r}: recomputing recorded step {row.step} gave weights "
                f"{report.weights_sha256[:12]}, recorded were {row.weights_sha256[:12]}. The machine, the torch "
                f"version or the thread count differs from the run's; resume where it was started."
            )
        version = report.policy_version
    return version


class _Saver:
    """Saves the trainer every few steps; awaited by the orchestrator after each step."""

    def __init__(
        self,
        workspace: Workspace,
        stage: str,
        config: SamplingStage,
        trainer: Trainer,
        loaded: Loaded,
    ) -> None:
        self._workspace = workspace
        self._stage = stage
        self._every = config.checkpoint_every_steps
        self._trainer = trainer
        self._loaded = loaded
        self._directory = workspace.run.stage(stage)
        self._writer = self._directory.writer(keep_last=2)

    async def __call__(self, report: StepReport) -> None:
        if (report.step + 1) % self._every == 0:
            await self.save(report.step + 1, report.policy_version)

    async def save(self, step: int, policy_version: int) -> Path:
        """Write a checkpoint of the trainer as it is after so many steps, unless there is one."""
        path = self._writer.path(step)
        if path in list_checkpoints(self._directory.checkpoints_path):
            return path
        fields = self._workspace.manifest_fields(
            stage=self._stage,
            step=step,
            policy_version=policy_version,
            model=self._loaded.model,
            attention=self._loaded.attention,
        )
        with_fields = self._writer.open(**fields)  # type: ignore[arg-type]
        with with_fields as staging:
            await self._trainer.save(str(staging))
        return path
