"""The engine that a recipe asks for, serving one checkpoint until a block ends."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import SglangConfig, VllmConfig
from longarc.config.stages import RolloutConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.launch import open_sglang, open_vllm
from longarc.engine.served import ServedLimits
from longarc.engine.verify import VerifiedEngine
from longarc.models.hf_weights import save_pretrained_dir
from longarc.pipeline.workspace import Loaded, Workspace
from longarc.records.ports import Engine
from longarc.records.sampling import WeightSource
from longarc.runs.checkpoint import file_sha256


@contextlib.asynccontextmanager
async def open_engine(
    workspace: Workspace,
    loaded: Loaded,
    rollout: RolloutConfig,
    *,
    policy_version: int,
    num_threads: int,
) -> AsyncIterator[Engine]:
    """Serve a checkpoint.

    Args:
        workspace: the run.
        loaded: the checkpoint; its model is not touched.
        rollout: how it is sampled.
        policy_version: version [optimizer steps] of the weights the engine starts with.
        num_threads: compute threads of an embedded engine; never more than there are cores, which changes no
            number.

    Raises:
        EngineError: a server does not start or answer.
        ConfigError: the server cannot serve this model, or was started in a way LongArc cannot use.
        WeightMismatchError: the server computes another model.
    """
    config = workspace.recipe.engine
    # The engine changes the weights of the model it is given.
    own = workspace.load(loaded.path)
    if isinstance(config, EngineConfig):
        # A run may be served or evaluated on a smaller machine than it was made on.
        threads = min(num_threads, len(os.sched_getaffinity(0)))
        async with EmbeddedEngine(
            own.model,
            config.model_copy(update={"num_threads": threads}),
            max_context_tokens=rollout.max_context_tokens,
            policy_version=policy_version,
            attention=loaded.attention,
            seed=workspace.recipe.seed,
            token_bytes=workspace.tokenizer().token_bytes,
        ) as engine:
            yield engine
        return
    async with _served(workspace, config, own, rollout, policy_version=policy_version) as engine:
        yield engine


@contextlib.asynccontextmanager
async def _served(
    workspace: Workspace,
    config: VllmConfig | SglangConfig,
    loaded: Loaded,
    rollout: RolloutConfig,
    *,
    policy_version: int,
) -> AsyncIterator[Engine]:
    directory = workspace.run.stage(loaded.manifest.stage).path / f"served-by-{config.kind}"
    model_directory = directory / "model"
    save_pretrained_dir(loaded.model, model_directory)
    limits = ServedLimits(
        vocab_size=loaded.model.config.vocab_size,
        max_context_tokens=rollout.max_context_tokens,
        max_requests=config.max_running + config.max_waiting,
        update_timeout_s=config.update_timeout_s,
    )
    opened = (
        open_vllm(
            config,
            limits,
            model_directory=model_directory,
            log=directory / "server.log",
            policy_version=policy_version,
            seed=workspace.recipe.seed,
        )
        if isinstance(config, VllmConfig)
        else open_sglang(
            config,
            limits,
            model_directory=model_directory,
            log=directory / "server.log",
            policy_version=policy_version,
            seed=workspace.recipe.seed,
        )
    )
    async with opened as inner:
        engine = VerifiedEngine(
            inner,
            loaded.model,
            name=f"the {config.kind} engine",
            max_mean_gap=config.probe_bound,
            max_context_tokens=rollout.max_context_tokens,
            attention=loaded.attention,
            seed=workspace.recipe.seed,
        )
        try:
            if config.url is None:
                await engine.check(policy_version)
            else:
                # A server that runs already has whatever weights it had.
                await engine.update_weights(_weights_of(loaded.path), policy_version=policy_version)
            yield engine
        finally:
            engine.close()
            shutil.rmtree(model_directory, ignore_errors=True)


def _weights_of(checkpoint: Path) -> WeightSource:
    path = checkpoint / "model.safetensors"
    return WeightSource(path=str(path), sha256=file_sha256(path))
