"""New weights while sequences run: what each policy does with them, and which version sampled each token."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.config.engine import EngineConfig
from longarc.config.model import AttentionPattern
from longarc.errors import ContractError, WeightsRefusedError
from longarc.models.build import build_model
from longarc.models.conversion import hybrid_config
from longarc.models.hf_weights import save_weights
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256
from model_cases import sharpened, small_glm, small_llama

CONFIGS = {
    "glm": small_glm(),
    "llama": small_llama(),
    "hybrid": hybrid_config(
        small_llama(num_hidden_layers=4),
        AttentionPattern(layers="FSGD", window=16, chunk_tokens=16),
    ),
}
PROMPT = list(range(1, 41))
OTHERS = {name: config for name, config in CONFIGS.items() if name != "hybrid"}


def model_of(config, version):
    """Return the model that a version means in these tests."""
    return sharpened(build_model(config, seed=version))


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def publish(tmp_path):
    def publish(config, version):
        path = tmp_path / f"{version}.safetensors"
        save_weights(model_of(config, version), str(path))
        return WeightSource(path=str(path), sha256=file_sha256(path))

    return publish


def open_engine(config, *, version=0, **settings):
    return LockStepEngine(
        model_of(config, version),
        EngineConfig(**{"max_running": 4, "max_prefill_tokens": 32, **settings}),
        max_context_tokens=160,
        policy_version=version,
    )


@dataclass
class Completed:
    """What a completion was, token by token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_cached: int = 0

    def add(self, piece):
        self.ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += [piece.policy_version] * len(piece.token_ids)
        self.num_cached += piece.num_cached_tokens


async def complete(engine, prompt=PROMPT, *, session="s", after=None, then=None, **sampling):
    """Sample a completion; once ``after`` tokens came, await ``then``."""
    asked = Sampling(**{"max_new_tokens": 40, "seed": 5, "stream_interval_tokens": 1, **sampling})
    done = Completed()
    async for piece in engine.stream(prompt, asked, session_id=session):
        done.add(piece)
        if after is not None and len(done.ids) >= after:
            after = None
            await then()
    return done


def scored(config, version, ids, start):
    """Return the log-probability of each token from ``start`` on, every row computed by one version."""
    model = model_of(config, version)
    whole = torch.tensor(ids)
    hidden = model(whole, Layout.documents([len(whole)])).hidden
    return token_logprobs(hidden[:-1], model.output_weight, whole[1:])[0][start - 1 :].detach()


def gaps(config, done, prompt=PROMPT):
    """Return by version how far its tokens are from what that version computes without a cache of another one."""
    found = {}
    for version in set(done.versions):
        expected = scored(config, version, prompt + done.ids, len(prompt))
        of_version = [i for i, v in enumerate(done.versions) if v == version]
        difference = torch.tensor(done.logprobs) - expected
        found[version] = float(difference[of_version].abs().max())
    return found


@pytest.mark.parametrize("policy", [None, "continue", "recompute", "finish"])
async def test_each_policy_computes_with_the_weights_it_says_and_every_token_names_its_version(
    config, publish, policy
):
    new = publish(config, 7)
    async with open_engine(config) as engine:

        async def update():
            await engine.update_weights(new, policy_version=7)

        done = await complete(engine, after=10, then=update, on_update=policy)
        health = await engine.health()
    assert len(done.ids) == 40
    assert done.versions == sorted(done.versions)
    assert set(done.versions) == ({0} if policy == "finish" else {0, 7})
    found = gaps(config, done)
    assert found[0] < 5e-5
    if policy == "recompute":
        assert found[7] < 5e-5
        assert health.num_recomputed_tokens >= len(PROMPT) + 10
    else:
        assert health.num_recomputed_tokens == 0
    if policy in (None, "continue"):
        assert found[7] > 1e-3  # the cache of the old weights is still there
    assert health.num_preemptions == 0


async def test_who_finishes_samples_what_would_have_followed_and_newcomers_have_the_new_weights(
    config, publish
):
    async with open_engine(config) as engine:
        undisturbed = await complete(engine)
    async with open_engine(config, version=7) as engine:
        expected = await complete(engine, session="late", seed=9, max_new_tokens=10)
    new = publish(config, 7)
    late = Completed()
    async with open_engine(config) as engine:

        async def update():
            nonlocal late
            await engine.update_weights(new, policy_version=7)
            late = await complete(engine, session="late", seed=9, max_new_tokens=10)

        done = await complete(engine, after=10, then=update, on_update="finish")
    assert done.ids == undisturbed.ids
    # The same prompt is in the cache, computed by the old weights: it serves nobody.
    assert late.num_cached == 0
    assert set(late.versions) == {7}
    assert late.ids == expected.ids
    assert gaps(config, late)[7] < 5e-5


async def test_a_further_update_waits_for_who_finishes_and_then_comes(config, publish):
    sources = {version: publish(config, version) for version in (7, 9)}
    async with open_engine(config) as engine, asyncio.TaskGroup() as tasks:
        second = None

        async def update_twice():
            nonlocal second
            await engine.update_weights(sources[7], policy_version=7)
            second = tasks.create_task(engine.update_weights(sources[9], policy_version=9))

        goes_along = tasks.create_task(complete(engine, session="b", max_new_tokens=100))
        finishes = await complete(engine, after=10, then=update_twice, on_update="finish")
        await second
        assert (await engine.health()).num_updates == 2
        along = await goes_along
    assert set(finishes.versions) == {0}
    # As long as one sequence ended with version 0, the others had version 7 and nothing newer.
    assert set(along.versions) == {0, 7, 9}
    assert along.versions.count(7) >= 25


async def test_a_request_that_nobody_listens_to_holds_up_no_update(config, publish):
    sources = {version: publish(config, version) for version in (7, 9)}
    async with open_engine(config) as engine:
        asked = Sampling(max_new_tokens=110, stream_interval_tokens=1, on_update="finish")
        stream = engine.stream(PROMPT, asked, session_id="s")
        await anext(stream)
        await engine.update_weights(sources[7], policy_version=7)
        await stream.aclose()
        await engine.update_weights(sources[9], policy_version=9)
        assert (await engine.health()).policy_version == 9
        assert engine._weights.held is None


@pytest.mark.skipif(native() is None, reason="eager attention rounds by the shape of the batch")
@pytest.mark.parametrize("name", OTHERS)
async def test_who_finishes_does_so_even_where_its_pages_are_taken_away(name, publish):
    config = OTHERS[name]
    prompts = [[i, *range(20 + i)] for i in range(4)]
    async with open_engine(config) as engine:
        expected = [await complete(engine, p, session=f"{i}") for i, p in enumerate(prompts)]
    new = publish(config, 7)
    async with open_engine(config, cache_tokens=176, page_tokens=16) as engine:

        async def update():
            await engine.update_weights(new, policy_version=7)

        found = await asyncio.gather(
            *(
                complete(
                    engine,
                    prompt,
                    session=f"{i}",
                    after=3 if i == 0 else None,
                    then=update,
                    on_update="finish",
                )
                for i, prompt in enumerate(prompts)
            )
        )
        health = await engine.health()
    assert health.num_preemptions > 0
    begun = [i for i, done in enumerate(found) if set(done.versions) == {0}]
    assert len(begun) >= 2
    for i in begun:
        assert (found[i].ids, found[i].logprobs) == (expected[i].ids, expected[i].logprobs)


@pytest.mark.skipif(native() is None, reason="eager attention rounds by the shape of the batch")
@pytest.mark.parametrize("name", OTHERS)
async def test_who_finishes_and_lost_its_pages_uses_nothing_that_the_new_weights_computed(
    name, publish
):
    config = OTHERS[name]
    async with open_engine(config) as engine:
        expected = await complete(engine, session="young", max_new_tokens=60)
    new = publish(config, 7)
    async with open_engine(config, cache_tokens=176, page_tokens=16) as engine:

        async def update():
            await engine.update_weights(new, policy_version=7)

        # The old one computes their common prompt again, by the new weights; then both are too long for the cache.
        old, young = await asyncio.gather(
            complete(
                engine,
                session="old",
                seed=1,
                max_new_tokens=100,
                after=5,
                then=update,
                on_update="recompute",
            ),
            complete(engine, session="young", max_new_tokens=60, on_update="finish"),
        )
        health = await engine.health()
    assert health.num_preemptions > 0
    assert set(old.versions) == {0, 7}
    assert set(young.versions) == {0}
    assert (young.ids, young.logprobs) == (expected.ids, expected.logprobs)


@pytest.mark.parametrize("name", OTHERS)
async def test_a_group_that_recomputes_computes_its_prompt_once(name, publish):
    config = OTHERS[name]
    new = publish(config, 7)
    async with open_engine(config, max_prefill_tokens=64) as engine:

        async def update():
            await engine.update_weights(new, policy_version=7)

        group = await asyncio.gather(
            *(
                complete(
                    engine,
                    session=f"g{i}",
                    seed=i,
                    after=8 if i == 0 else None,
                    then=update,
                    on_update="recompute",
                )
                for i in range(4)
            )
        )
        health = await engine.health()
    for done in group:
        assert set(done.versions) == {0, 7}
        assert max(gaps(config, done).values()) < 5e-5
    sampled_before = sum(done.versions.count(0) for done in group)
    assert health.num_recomputed_tokens <= len(PROMPT) + sampled_before + 4


async def test_weights_that_are_refused_change_nothing_while_sequences_run(
    config, publish, tmp_path
):
    new = publish(config, 7)
    wrong = publish(CONFIGS["llama" if config.family == "glm_moe_dsa" else "glm"], 8)
    half = tmp_path / "half.safetensors"
    half.write_bytes(Path(new.path).read_bytes()[:-1000])
    half_written = WeightSource(path=str(half), sha256=file_sha256(half))
    async with open_engine(config) as engine:
        undisturbed = await complete(engine)
    async with open_engine(config) as engine:

        async def update():
            damaged = WeightSource(path=new.path, sha256="0" * 64)
            missing = WeightSource(path=str(tmp_path / "none"), sha256=new.sha256)
            for source in (damaged, wrong, half_written, missing):
                with pytest.raises(WeightsRefusedError, match="were not loaded"):
                    await engine.update_weights(source, policy_version=7)

        done = await complete(engine, after=5, then=update)
        assert (await engine.health()).num_updates == 0
        await engine.update_weights(new, policy_version=7)
        assert set((await complete(engine)).versions) == {7}
    assert (done.ids, set(done.versions)) == (undisturbed.ids, {0})


async def test_a_version_that_comes_twice_is_another_one_for_the_cache(config, publish):
    new = publish(config, 7)
    async with open_engine(config) as engine:
        await complete(engine)
        await engine.update_weights(new, policy_version=0)
        again = await complete(engine)
    assert again.num_cached == 0


def test_a_policy_that_is_none_is_refused_by_name():
    with pytest.raises(ContractError, match=r"on_update='drain' has to be None or one of"):
        Sampling(max_new_tokens=1, on_update="drain")
