"""vLLM or SGLang serving one checkpoint of a run, verified against the trainer's own arithmetic."""

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from longarc.config.engine_clients import SglangConfig, VllmConfig
from longarc.config.rollout import RolloutConfig
from longarc.engine.launch import open_sglang, open_vllm
from longarc.engine.served import ServedLimits
from longarc.engine.verify import VerifiedEngine
from longarc.models.hf_weights import save_pretrained_dir
from longarc.pipeline.workspace import Loaded, Workspace
from longarc.records.ports import Engine
from longarc.records.sampling import WeightSource
from longarc.runs.checkpoint import file_sha256


@contextlib.asynccontextmanager
async def engine_client(
    workspace: Workspace,
    config: VllmConfig | SglangConfig,
    loaded: Loaded,
    rollout: RolloutConfig,
    *,
    policy_version: int,
) -> AsyncIterator[Engine]:
    """Serve a checkpoint with vLLM or SGLang until the block ends, every weight update verified.

    Args:
        workspace: the run.
        config: the recipe's engine.
        loaded: the checkpoint; its model becomes the reference of the verification, and changes.
        rollout: how it is sampled.
        policy_version: version [optimizer steps] of the weights the engine starts with.

    Raises:
        EngineError: the server does not start or answer.
        ConfigError: the server cannot serve this model, or was started in a way LongArc cannot use.
        WeightMismatchError: the server computes another model.
    """
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
