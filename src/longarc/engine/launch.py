"""Starts the server of an engine from elsewhere, or finds the one that runs, and puts the engine port before it."""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from longarc.config.engine_clients import SglangConfig, VllmConfig
from longarc.engine import vllm_worker
from longarc.engine.http_json import HttpJson
from longarc.engine.served import ServedEngine, ServedLimits
from longarc.engine.server_process import ServerProcess, free_port
from longarc.engine.sglang import SglangServer
from longarc.engine.sglang_pair import SglangPair
from longarc.engine.sglang_weights import transport_of
from longarc.engine.vllm import LOADER, VllmServer
from longarc.engine.vllm_pair import VllmPair

_logger = logging.getLogger(__name__)

_LEAST_BATCHED_TOKENS = 2048
"""Of one step: what vLLM itself takes at least, so that short prompts are computed together."""
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""No server asks the network for what it was given."""


@contextlib.asynccontextmanager
async def open_vllm(
    config: VllmConfig,
    limits: ServedLimits,
    *,
    model_directory: Path,
    log: Path,
    policy_version: int,
    seed: int = 0,
) -> AsyncIterator[ServedEngine]:
    """Serve a model with vLLM until the block ends.

    Args:
        config: which server, and how it runs.
        limits: what requests may ask for.
        model_directory: Hugging Face directory with the weights of ``policy_version``.
        log: where a started server's output goes.
        policy_version: of the weights it starts with [optimizer steps].
        seed: of requests that bring none.

    Raises:
        EngineError: the server does not start or answer.
        ConfigError: a server that runs already was started in a way LongArc cannot use.
    """
    async with contextlib.AsyncExitStack() as stack:
        if config.url is not None:
            server: VllmServer | VllmPair = await _running_vllm(stack, config, config.url)
        else:
            # A directory that only this user can enter: whoever reaches the socket can change the weights.
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longarc-vllm-")))
            shutil.copy(vllm_worker.__file__, own / f"{LOADER.partition('.')[0]}.py")
            socket = own / "socket"
            http = HttpJson("http://vllm", socket=str(socket))
            stack.push_async_callback(http.close)
            server = started = VllmServer(http, on_update=config.on_update)
            process = await ServerProcess.start(
                _vllm_argv(config, limits, model_directory, socket),
                name="vLLM",
                environment={
                    **_QUIET,
                    # Pausing, loading and versions are endpoints of vLLM's development mode.
                    "VLLM_SERVER_DEV_MODE": "1",
                    "OMP_NUM_THREADS": str(config.num_threads),
                    # Threads that are not pinned leave the cores to whoever needs them.
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "PYTHONPATH": str(own),
                    **config.environment,
                },
                log=log,
                is_up=started.is_up,
                timeout_s=config.start_timeout_s,
            )
            stack.push_async_callback(process.close)
        await server.label(policy_version)
        yield ServedEngine(server, limits, policy_version=policy_version, seed=seed)


async def _running_vllm(
    stack: contextlib.AsyncExitStack, config: VllmConfig, url: str
) -> VllmServer | VllmPair:
    """Check what runs already: one server, or one that decodes and one that prefills."""
    decode = VllmServer(_opened(stack, url), on_update=config.on_update)
    if config.prefill_url is None:
        await decode.check()
        return decode
    prefill = VllmServer(_opened(stack, config.prefill_url), on_update=config.on_update)
    pair = VllmPair(prefill, decode, on_update=config.on_update, max_mean_gap=config.probe_bound)
    await pair.check()
    return pair


def _opened(stack: contextlib.AsyncExitStack, url: str) -> HttpJson:
    http = HttpJson(url)
    stack.push_async_callback(http.close)
    return http


def _vllm_argv(
    config: VllmConfig, limits: ServedLimits, model_directory: Path, socket: Path
) -> list[str]:
    assert config.python is not None
    return [
        # Not the `vllm` command, which the CPU build of 0.32.0 breaks (it asks for the package's other name).
        *(config.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model_directory), "--uds", str(socket)),
        *("--dtype", config.dtype, "--max-model-len", str(limits.max_context_tokens)),
        *("--max-num-seqs", str(config.max_running)),
        *("--kv-cache-memory-bytes", str(int(config.kv_cache_gib * 2**30))),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--worker-extension-cls", LOADER),
        *("--skip-tokenizer-init", "--enable-scale-out", "--enable-prompt-tokens-details"),
        *(("--enforce-eager",) if config.eager else ()),
        *_prefill(config, limits),
        *config.args,
    ]


def _prefill(config: VllmConfig, limits: ServedLimits) -> tuple[str, ...]:
    if config.chunked_prefill:
        return ("--enable-chunked-prefill",)
    # A step has to hold the longest prompt then, and what `recompute` makes a prompt of.
    return (
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens"),
        str(max(limits.max_context_tokens, _LEAST_BATCHED_TOKENS)),
    )


@contextlib.asynccontextmanager
async def open_sglang(
    config: SglangConfig,
    limits: ServedLimits,
    *,
    model_directory: Path,
    log: Path,
    policy_version: int,
    seed: int = 0,
) -> AsyncIterator[ServedEngine]:
    """Serve a model with SGLang until the block ends; as `open_vllm`, and never run against a real server."""
    async with contextlib.AsyncExitStack() as stack:
        url = config.url or f"http://127.0.0.1:{free_port()}"
        server = _sglang(stack, config, url, model_directory)
        if config.url is None:
            process = await ServerProcess.start(
                _sglang_argv(config, limits, model_directory, url),
                name="SGLang",
                environment={
                    **_QUIET,
                    "OMP_NUM_THREADS": str(config.num_threads),
                    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
                    **config.environment,
                },
                log=log,
                is_up=server.is_up,
                timeout_s=config.start_timeout_s,
            )
            stack.push_async_callback(process.close)
        checked: SglangServer | SglangPair = server
        if config.prefill_url is None:
            await server.check(deterministic=config.deterministic)
        else:
            prefill = _sglang(stack, config, config.prefill_url, model_directory)
            checked = await SglangPair.found(
                prefill,
                server,
                prefill_url=config.prefill_url,
                deterministic=config.deterministic,
            )
        if not config.deterministic:
            _logger.warning(
                "SGLang ignores seeds without deterministic inference: the run cannot be repeated; set "
                "engine.deterministic = true if it has to be"
            )
        await checked.label(policy_version)
        yield ServedEngine(checked, limits, policy_version=policy_version, seed=seed)


def _sglang(
    stack: contextlib.AsyncExitStack, config: SglangConfig, url: str, model_directory: Path
) -> SglangServer:
    http = _opened(stack, url)
    transport = stack.enter_context(transport_of(config, http, model_directory))
    return SglangServer(http, transport, on_update=config.on_update)


def _sglang_argv(
    config: SglangConfig, limits: ServedLimits, model_directory: Path, url: str
) -> list[str]:
    assert config.python is not None
    return [
        *(config.python, "-m", "sglang.launch_server", "--model-path", str(model_directory)),
        *("--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
        *("--dtype", config.dtype, "--context-length", str(limits.max_context_tokens)),
        *("--max-running-requests", str(config.max_running), "--tp-size", str(config.num_ranks)),
        *("--skip-tokenizer-init", "--sampling-defaults", "openai", "--enable-metrics"),
        *(("--enable-deterministic-inference",) if config.deterministic else ()),
        *config.args,
    ]
