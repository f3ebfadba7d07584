"""Servers that run already, over real sockets."""

import contextlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fake_engine_servers import FakeServer, FakeSglang, FakeVllm
from fake_server_pairs import sglang_parts, vllm_parts
from longarc.config.engine_clients import SglangConfig, VllmConfig
from longarc.engine.launch import open_sglang, open_vllm
from longarc.engine.served import ServedLimits
from longarc.errors import ConfigError, EngineError
from longarc.gateway.server import bound_socket, serving
from longarc.records.sampling import Sampling

LIMITS = ServedLimits(vocab_size=100, max_context_tokens=64, max_requests=8, update_timeout_s=30.0)


@contextlib.asynccontextmanager
async def served(fake: FakeServer):
    async def answer(request: Request) -> Response:
        passed = httpx.Request(request.method, str(request.url), content=await request.body())
        given = await fake.handle_async_request(passed)
        body = b"".join([part async for part in given.stream])
        return Response(body, status_code=given.status_code)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    async with serving(app, bound_socket("127.0.0.1", 0)) as url:
        yield url


@pytest.mark.parametrize(
    ("fake", "config", "open_server"),
    [
        (FakeVllm(), VllmConfig, open_vllm),
        (FakeSglang(), SglangConfig, open_sglang),
    ],
)
async def test_a_server_that_runs_already_is_checked_labelled_and_used(
    fake, config, open_server, tmp_path
):
    kind = "vllm" if config is VllmConfig else "sglang"
    async with served(fake) as url:
        opened = open_server(
            config(kind=kind, url=url),
            LIMITS,
            model_directory=tmp_path,
            log=tmp_path / "log",
            policy_version=6,
        )
        async with opened as engine:
            pieces = [
                piece
                async for piece in engine.stream(
                    [5, 6], Sampling(max_new_tokens=3, stream_interval_tokens=2), session_id="s"
                )
            ]
    assert [piece.token_ids for piece in pieces] == [(7, 8), (9,)]
    assert {piece.policy_version for piece in pieces} == {6}
    assert fake.version == "6"


@pytest.mark.parametrize(
    ("parts", "kind", "config", "open_server"),
    [
        (vllm_parts(), "vllm", VllmConfig, open_vllm),
        (sglang_parts(host="127.0.0.1"), "sglang", SglangConfig, open_sglang),
    ],
)
async def test_two_servers_that_run_already_are_checked_labelled_and_used_together(
    parts, kind, config, open_server, tmp_path
):
    prefill, decode = parts
    async with served(prefill) as prefill_url, served(decode) as url:
        opened = open_server(
            config(kind=kind, url=url, prefill_url=prefill_url, on_update="finish"),
            LIMITS,
            model_directory=tmp_path,
            log=tmp_path / "log",
            policy_version=6,
        )
        async with opened as engine:
            pieces = [
                piece
                async for piece in engine.stream([5, 6], Sampling(max_new_tokens=3), session_id="s")
            ]
    assert [(piece.token_ids, piece.policy_version) for piece in pieces] == [((7, 8, 9), 6)]
    assert (prefill.version, decode.version) == ("6", "6")


async def test_a_server_whose_log_probabilities_mean_something_else_is_not_used(tmp_path):
    async with served(FakeVllm(logprobs_mode="raw_logprobs")) as url:
        opened = open_vllm(
            VllmConfig(kind="vllm", url=url),
            LIMITS,
            model_directory=tmp_path,
            log=tmp_path / "log",
            policy_version=0,
        )
        with pytest.raises(ConfigError, match="processed_logprobs"):
            async with opened:
                pass


async def test_a_server_that_is_not_there_is_an_error_that_names_the_address(tmp_path):
    listener = bound_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    opened = open_vllm(
        VllmConfig(kind="vllm", url=url),
        LIMITS,
        model_directory=tmp_path,
        log=tmp_path / "log",
        policy_version=0,
    )
    with pytest.raises(EngineError, match=url):
        async with opened:
            pass
