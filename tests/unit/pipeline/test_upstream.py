"""What stands behind the gateway alone: vLLM and SGLang, alone and in pairs, as they say they were started."""

import json
import logging

import pytest

from fake_engine_servers import FakeSglang, FakeVllm
from fake_server_pairs import sglang_parts, vllm_parts
from longarc.engine.http_json import HttpJson
from longarc.errors import ConfigError, EngineLostError
from longarc.pipeline.upstream import UpstreamSettings, open_upstream
from longarc.records.sampling import Sampling

DECODE, PREFILL = "http://decode:1", "http://prefill:1"
SAMPLING = Sampling(max_new_tokens=3)


@pytest.fixture
def settings(tmp_path):
    config = {"vocab_size": 4096, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def make(kind, *, prefill=(PREFILL,), addresses=(DECODE,), **more):
        return UpstreamSettings(
            kind=kind,
            addresses=addresses,
            prefill_addresses=prefill,
            key=more.pop("key", None),
            model_directory=tmp_path,
            max_context_tokens=None,
            policy_version=more.pop("policy_version", 7),
        )

    return make


def network(**servers):
    """Servers by host name; the others do not answer."""

    def connect(address, key):
        fake = servers.get(address.removeprefix("http://").partition(":")[0])
        return HttpJson("http://127.0.0.1:1") if fake is None else HttpJson(address, transport=fake)

    return connect


async def sampled(settings, connect):
    async with open_upstream(settings, connect=connect) as upstream:
        pieces = [p async for p in upstream.engine.stream([5, 6], SAMPLING, session_id="s")]
    ids = [token for piece in pieces for token in piece.token_ids]
    return ids, {piece.policy_version for piece in pieces}


@pytest.mark.parametrize(("kind", "parts"), [("vllm", vllm_parts), ("sglang", sglang_parts)])
async def test_a_pair_prefills_at_one_server_and_decodes_at_the_other(settings, kind, parts):
    prefill, decode = parts()
    ids, versions = await sampled(settings(kind), network(prefill=prefill, decode=decode))
    assert (ids, versions) == ([7, 8, 9], {7})
    path = "/generate" if kind == "sglang" else "/inference/v1/generate"
    assert path in prefill.paths()
    assert path in decode.paths()
    assert (prefill.version, decode.version) == ("7", "7")


@pytest.mark.parametrize(("kind", "fake"), [("vllm", FakeVllm), ("sglang", FakeSglang)])
async def test_a_server_that_does_both_needs_no_other(settings, kind, fake):
    ids, _ = await sampled(settings(kind, prefill=()), network(decode=fake()))
    assert ids == [7, 8, 9]


async def test_sglang_is_asked_how_it_was_started(settings, caplog):
    mute = FakeSglang(info={"enable_metrics": False})
    with pytest.raises(ConfigError, match="start it with --enable-metrics"):
        await sampled(settings("sglang", prefill=()), network(decode=mute))
    half = sglang_parts()[1]
    with pytest.raises(ConfigError, match=r"--prefill\) the one that prefills"):
        await sampled(settings("sglang", prefill=()), network(decode=half))
    prefill, decode = sglang_parts()
    with pytest.raises(ConfigError, match="mode prefill, it needs decode"):
        await sampled(settings("sglang"), network(prefill=decode, decode=prefill))
    assert "/update_weight_version" not in mute.paths() + half.paths() + prefill.paths()

    caplog.set_level(logging.WARNING)
    for deterministic in (True, False):
        caplog.clear()
        info = {"enable_metrics": True, "enable_deterministic_inference": deterministic}
        await sampled(settings("sglang", prefill=()), network(decode=FakeSglang(info=info)))
        assert ("ignores seeds" in caplog.text) is not deterministic


async def test_vllm_that_hands_no_cache_over_is_no_half_of_a_pair(settings):
    prefill, decode = vllm_parts()
    prefill.kv_transfer_config = None
    with pytest.raises(ConfigError, match=r"has no KV connector.*\(--prefill\) out"):
        await sampled(settings("vllm"), network(prefill=prefill, decode=decode))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("missing", ["prefill", "decode"])
async def test_a_server_that_does_not_answer_is_named(settings, kind, missing):
    prefill, decode = (vllm_parts if kind == "vllm" else sglang_parts)()
    servers = {"prefill": prefill, "decode": decode}
    del servers[missing]
    with pytest.raises(EngineLostError, match=f"http://{missing}:1 does not answer"):
        await sampled(settings(kind), network(**servers))


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("vllm", {"prefill": (PREFILL, "http://another:1")}, "1 --upstream and 2 --prefill"),
        ("sglang", {"prefill": (DECODE + "/",)}, "are both http://decode:1"),
        ("vllm", {"policy_version": None}, "needs --policy-version"),
        ("longarc", {"key": "k", "policy_version": None}, "--prefill is for vLLM and SGLang"),
    ],
)
async def test_what_does_not_fit_together_is_refused_before_anybody_is_asked(
    settings, kind, more, reason
):
    with pytest.raises(ConfigError, match=reason):
        await sampled(settings(kind, **more), network())
