"""A real vLLM (its CPU build, in an environment of its own) behind the engine port: ``make integration``.

The model is a small random one with a tied output head, whose distributions are far from uniform, so that
stale weights show. One server serves the whole module, and every test leaves it with the first weights.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from longarc.config.engine_clients import VllmConfig
from longarc.config.model import LlamaConfig
from longarc.engine.launch import open_vllm
from longarc.engine.sampler import sampling_logprobs
from longarc.engine.served import ServedEngine, ServedLimits
from longarc.engine.verify import VerifiedEngine
from longarc.engine.vllm import VllmServer
from longarc.errors import EngineError, WeightMismatchError
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import save_pretrained_dir, save_weights
from longarc.models.layout import Layout
from longarc.records.sampling import SampledTokens, Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not os.access(PYTHON, os.X_OK),
        reason=".venv-vllm is missing: make vllm",
    ),
]

CONFIG = LlamaConfig(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=256,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    initializer_range=0.15,
)
CONTEXT = 6000
"""So long that a sequence still runs when an update comes, however busy the machine is [tokens]."""
PROMPT = [3, 141, 59, 265, 358, 97, 93, 238]
TOLERANCE = 2e-4
"""Of a log-probability [nats]: two implementations in float32."""


@dataclass
class Serving:
    engine: ServedEngine
    server: VllmServer
    directory: Path

    def published(self, model: Decoder, name: str) -> WeightSource:
        path = self.directory / f"{name}.safetensors"
        save_weights(model, path)
        return WeightSource(path=str(path), sha256=file_sha256(path))

    def with_policy(self, on_update: str) -> ServedEngine:
        server = VllmServer(self.server.http, on_update=on_update)
        return ServedEngine(server, LIMITS, policy_version=0, seed=1)

    async def restore(self) -> None:
        await self.engine.update_weights(self.published(model(0), "first"), policy_version=0)


LIMITS = ServedLimits(
    vocab_size=CONFIG.vocab_size,
    max_context_tokens=CONTEXT,
    max_requests=64,
    update_timeout_s=120.0,
)


def model(seed: int) -> Decoder:
    return build_model(CONFIG, seed=seed).eval().requires_grad_(False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    directory = tmp_path_factory.mktemp("vllm")
    save_pretrained_dir(model(0), directory / "model")
    config = VllmConfig(kind="vllm", python=str(PYTHON), kv_cache_gib=0.5, max_running=16)
    async with open_vllm(
        config,
        LIMITS,
        model_directory=directory / "model",
        log=directory / "server.log",
        policy_version=0,
    ) as engine:
        assert isinstance(engine.server, VllmServer)
        yield Serving(engine, engine.server, directory)


def logits_of(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = decoder(torch.tensor(ids), Layout.documents([len(ids)]), attention="dense")
        return output.hidden @ decoder.output_weight.mT


def logprobs_of(decoder: Decoder, ids: list[int], sampling: Sampling) -> list[float]:
    """Of each token but the first, under the distribution that ``sampling`` describes."""
    rows = sampling_logprobs(logits_of(decoder, ids)[:-1], [sampling] * (len(ids) - 1))
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


async def sampled(
    engine: ServedEngine, sampling: Sampling, prompt: list[int] = PROMPT
) -> tuple[list[int], list[float], list[SampledTokens]]:
    pieces = [piece async for piece in engine.stream(prompt, sampling, session_id="s")]
    assert [piece.finish_reason is None for piece in pieces[:-1]] == [True] * (len(pieces) - 1)
    ids = [token for piece in pieces for token in piece.token_ids]
    return ids, [value for piece in pieces for value in piece.logprobs], pieces


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=24, seed=1, returns_raw_logprobs=True, returns_kept_ids=True),
        Sampling(max_new_tokens=24, seed=1, temperature=0.6, stream_interval_tokens=5),
        Sampling(max_new_tokens=24, seed=2, temperature=1.3, top_k=20),
        Sampling(max_new_tokens=24, seed=3, top_p=0.8),
        Sampling(max_new_tokens=24, seed=4, min_p=0.05),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
async def test_log_probabilities_are_those_of_the_distribution_sampled_from(vllm, sampling):
    ids, logprobs, pieces = await sampled(vllm.engine, sampling)
    expected = logprobs_of(model(0), PROMPT + ids, sampling)[len(PROMPT) - 1 :]
    assert len(ids) == 24
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert {piece.policy_version for piece in pieces} == {0}
    assert pieces[-1].finish_reason == "length"


async def test_a_greedy_completion_takes_the_most_likely_tokens_with_log_probability_zero(vllm):
    ids, logprobs, _ = await sampled(vllm.engine, Sampling(max_new_tokens=12, temperature=0.0))
    best = logits_of(model(0), PROMPT + ids)[len(PROMPT) - 1 : -1].argmax(dim=-1)
    assert ids == best.tolist()
    assert logprobs == [0.0] * 12


async def test_a_seed_gives_the_same_tokens_alone_and_in_company(vllm):
    wanted = Sampling(max_new_tokens=16, seed=77)
    alone, _, _ = await sampled(vllm.engine, wanted)
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(sampled(vllm.engine, Sampling(max_new_tokens=16, seed=seed)))
            for seed in range(6)
        ]
        again = tasks.create_task(sampled(vllm.engine, wanted))
    assert again.result()[0] == alone
    assert len({tuple(other.result()[0]) for other in others}) == 6


async def test_a_stop_id_ends_the_completion_and_is_its_last_token(vllm):
    free, _, _ = await sampled(vllm.engine, Sampling(max_new_tokens=16, seed=5))
    stop = free[7]
    stopped, _, pieces = await sampled(
        vllm.engine, Sampling(max_new_tokens=16, seed=5, stop_ids=(stop,))
    )
    assert stopped == free[: free.index(stop) + 1]
    assert pieces[-1].finish_reason == "stop"


async def test_scores_are_the_trainers(vllm):
    ids = [*PROMPT, 400, 17, 300]
    scores = await vllm.engine.score(ids)
    assert scores[0] == 0.0
    assert scores[1:] == pytest.approx(
        logprobs_of(model(0), ids, Sampling(max_new_tokens=1)), abs=TOLERANCE
    )


async def test_an_id_beyond_the_vocabulary_is_refused_here_because_it_would_end_the_server(vllm):
    with pytest.raises(EngineError, match=r"span 3\.\.512, but the vocabulary is 0\.\.511"):
        await sampled(vllm.engine, Sampling(max_new_tokens=2), prompt=[3, 512])
    assert len((await sampled(vllm.engine, Sampling(max_new_tokens=2)))[0]) == 2


async def test_closing_the_iterator_ends_the_request_on_the_server(vllm):
    long = Sampling(max_new_tokens=CONTEXT - len(PROMPT), stream_interval_tokens=1)
    before = (await vllm.engine.health()).num_sampled_tokens
    async with aclosing(vllm.engine.stream(PROMPT, long, session_id="s")) as pieces:
        async for _ in pieces:
            break
    async with asyncio.timeout(20):
        while (await vllm.engine.health()).num_running:
            await asyncio.sleep(0.05)
    assert (await vllm.engine.health()).num_sampled_tokens - before < long.max_new_tokens // 2


async def test_a_prompt_longer_than_a_step_of_vllms_own_choice_does_not_end_the_server(vllm):
    # In chunks, which LongArc turns off, a request with a seed ends the CPU build's engine.
    prompt = [(7 * i) % 500 for i in range(4000)]
    ids, logprobs, _ = await sampled(vllm.engine, Sampling(max_new_tokens=4, seed=1), prompt=prompt)
    expected = logprobs_of(model(0), prompt + ids, Sampling(max_new_tokens=4))[-4:]
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_cancelling_a_request_that_is_not_streamed_ends_it_on_the_server_too(vllm):
    long = Sampling(max_new_tokens=CONTEXT - len(PROMPT))
    before = (await vllm.engine.health()).num_sampled_tokens
    request = asyncio.ensure_future(sampled(vllm.engine, long))
    async with asyncio.timeout(20):
        while not (await vllm.engine.health()).num_running:
            await asyncio.sleep(0.02)
        request.cancel()
        while (await vllm.engine.health()).num_running:
            await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (await vllm.engine.health()).num_sampled_tokens - before < long.max_new_tokens


async def test_a_repeated_prompt_is_served_from_the_cache(vllm):
    prompt = [(7 * i) % 500 for i in range(300)]
    await sampled(vllm.engine, Sampling(max_new_tokens=1), prompt=prompt)
    _, _, pieces = await sampled(vllm.engine, Sampling(max_new_tokens=1), prompt=prompt)
    assert pieces[0].num_cached_tokens > 0


async def test_an_update_changes_the_model_and_its_tied_head(vllm):
    verified = VerifiedEngine(
        vllm.engine, model(0), name="vLLM", max_mean_gap=TOLERANCE, max_context_tokens=CONTEXT
    )
    try:
        await verified.check(0)
        await verified.update_weights(vllm.published(model(1), "second"), policy_version=5)
        ids, logprobs, pieces = await sampled(vllm.engine, Sampling(max_new_tokens=24, seed=1))
        expected = logprobs_of(model(1), PROMPT + ids, Sampling(max_new_tokens=1))
        assert logprobs == pytest.approx(expected[len(PROMPT) - 1 :], abs=TOLERANCE)
        assert {piece.policy_version for piece in pieces} == {5}
        assert (await verified.health()).policy_version == 5
    finally:
        verified.close()
        await vllm.restore()


async def test_the_probe_finds_the_head_that_a_reload_of_vllms_own_leaves_behind(vllm):
    # When this fails because nothing is raised, vLLM packs tied heads itself: remove `_pack_tied_heads`.
    save_pretrained_dir(model(1), vllm.directory / "other")
    verified = VerifiedEngine(
        vllm.engine, model(1), name="vLLM", max_mean_gap=0.1, max_context_tokens=CONTEXT
    )
    try:
        await vllm.server.http.post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(vllm.directory / "other")}},
        )
        with pytest.raises(WeightMismatchError, match="differ from the trainer's by"):
            await verified.check(0)
    finally:
        verified.close()
        await vllm.restore()


@pytest.mark.parametrize("interval", [0, 8])
async def test_running_sequences_go_on_with_new_weights_and_every_token_has_its_version(
    vllm, interval
):
    long = Sampling(max_new_tokens=CONTEXT - 8, seed=3, stream_interval_tokens=interval)
    second = vllm.published(model(1), "second")
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(sampled(vllm.engine, long)) for _ in range(2)]
            await begun(vllm.engine, tasks)
            await vllm.engine.update_weights(second, policy_version=1)
        for task in running:
            ids, logprobs, pieces = task.result()
            assert len(ids) == long.max_new_tokens
            versions = [piece.policy_version for piece in pieces]
            assert versions == sorted(versions)
            assert set(versions) == {0, 1}
            split = sum(len(p.token_ids) for p in pieces if p.policy_version == 0)
            old = logprobs_of(model(0), PROMPT + ids, long)[len(PROMPT) - 1 :]
            assert logprobs[:split] == pytest.approx(old[:split], abs=TOLERANCE)
            # The first token of the new weights is already theirs, so the split is at the very token.
            assert abs(logprobs[split] - old[split]) > TOLERANCE
    finally:
        await vllm.restore()


async def begun(engine: ServedEngine, tasks: asyncio.TaskGroup) -> None:
    """Return once a request that was sent now has sampled a token, and all before it have begun."""
    is_sampling = asyncio.Event()

    async def watch() -> None:
        asked = Sampling(max_new_tokens=CONTEXT // 2, seed=6, stream_interval_tokens=1)
        async with aclosing(engine.stream(PROMPT[:4], asked, session_id="watch")) as pieces:
            async for _ in pieces:
                is_sampling.set()
                return

    await asyncio.sleep(0)  # so that the others are sent first
    tasks.create_task(watch())
    await is_sampling.wait()


async def test_recompute_gives_the_log_probabilities_of_the_new_weights_alone(vllm):
    engine = vllm.with_policy("recompute")
    long = Sampling(max_new_tokens=CONTEXT - 8, seed=3)
    second = vllm.published(model(1), "second")
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(sampled(engine, long))
            await begun(engine, tasks)
            await engine.update_weights(second, policy_version=1)
        ids, logprobs, pieces = running.result()
        split = len(pieces[0].token_ids)
        assert [piece.policy_version for piece in pieces] == [0, 1]
        new = logprobs_of(model(1), PROMPT + ids, long)[len(PROMPT) - 1 :]
        assert logprobs[split:] == pytest.approx(new[split:], abs=TOLERANCE)
    finally:
        await vllm.restore()


async def test_finish_lets_running_sequences_end_on_the_old_weights(vllm):
    engine = vllm.with_policy("finish")
    long = Sampling(max_new_tokens=CONTEXT - 8, seed=3)
    second = vllm.published(model(1), "second")
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(sampled(engine, long))
            await begun(engine, tasks)
            await engine.update_weights(second, policy_version=1)
            assert running.done()
        assert {piece.policy_version for piece in running.result()[2]} == {0}
        _, _, pieces = await sampled(engine, Sampling(max_new_tokens=4))
        assert {piece.policy_version for piece in pieces} == {1}
    finally:
        await vllm.restore()


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(vllm):
    before = await sampled(vllm.engine, Sampling(max_new_tokens=8, seed=9))
    wide = build_model(CONFIG.model_copy(update={"intermediate_size": 192}), seed=0)
    half = vllm.directory / "half.safetensors"
    half.write_bytes(Path(vllm.published(model(1), "second").path).read_bytes()[:50_000])
    for source, reason in [
        (vllm.published(wide, "wide"), "has shape"),
        (WeightSource(path=str(half), sha256=file_sha256(half)), "were not loaded"),
        (WeightSource(path=str(half), sha256="0" * 64), "has digest"),
        (WeightSource(path=str(vllm.directory / "none"), sha256="0" * 64), "cannot be read"),
    ]:
        with pytest.raises(EngineError, match=reason):
            await vllm.engine.update_weights(source, policy_version=9)
    after = await sampled(vllm.engine, Sampling(max_new_tokens=8, seed=9))
    assert after[:2] == before[:2]
    assert {piece.policy_version for piece in after[2]} == {0}
