from dataclasses import dataclass, field

import pytest

from longarc.config.engine import EngineConfig
from longarc.config.model import LlamaConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.verify import VerifiedEngine
from longarc.errors import WeightMismatchError
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.records.ports import Engine
from longarc.records.sampling import WeightSource
from longarc.runs.checkpoint import file_sha256

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=48,
    num_hidden_layers=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    tie_word_embeddings=True,
)
BOUND = 1e-3


@dataclass
class Pretender:
    """An engine that says it took new weights, and puts others into the model."""

    inner: EmbeddedEngine
    instead: WeightSource | None = None
    updates: list[int] = field(default_factory=list)

    def stream(self, prompt_ids, sampling, *, session_id):
        return self.inner.stream(prompt_ids, sampling, session_id=session_id)

    async def score(self, token_ids, *, temperature=1.0):
        return await self.inner.score(token_ids, temperature=temperature)

    async def health(self):
        return await self.inner.health()

    async def update_weights(self, source, *, policy_version):
        self.updates.append(policy_version)
        await self.inner.update_weights(self.instead or source, policy_version=policy_version)


def published(tmp_path, name, change=None, *, seed=0):
    model = build_model(CONFIG, seed=seed)
    if change is not None:
        change(model)
    path = tmp_path / f"{name}.safetensors"
    save_weights(model, path)
    return WeightSource(path=str(path), sha256=file_sha256(path))


@pytest.fixture
async def verified():
    config = EngineConfig(cache_tokens=1024, max_running=4)
    async with EmbeddedEngine(
        build_model(CONFIG, seed=0), config, max_context_tokens=96
    ) as embedded:
        pretender = Pretender(embedded)
        assert isinstance(pretender, Engine)
        engine = VerifiedEngine(
            pretender,
            build_model(CONFIG, seed=0),
            name="the engine",
            max_mean_gap=BOUND,
            max_context_tokens=96,
        )
        await engine.check(0)
        yield engine, pretender
        engine.close()


async def test_an_engine_that_does_as_it_says_passes_and_its_gap_is_reported(verified, tmp_path):
    engine, _ = verified
    await engine.update_weights(published(tmp_path, "new", seed=1), policy_version=1)
    assert engine.last.policy_version == 1
    assert engine.last.mean_gap < 1e-5
    assert (await engine.health()).probe_gap == engine.last.mean_gap


async def test_weights_that_stayed_old_in_part_stop_the_run_with_both_numbers(verified, tmp_path):
    engine, pretender = verified

    def last_layer(model):
        model.model.layers[1].mlp.down_proj.weight.data.mul_(3)

    new = published(tmp_path, "new", last_layer)
    pretender.instead = published(tmp_path, "old")
    with pytest.raises(
        WeightMismatchError, match=r"weights 1.*differ from the trainer's by 0\.\d+"
    ) as caught:
        await engine.update_weights(new, policy_version=1)
    assert "engine.max_probe_gap" in str(caught.value)
    assert f"{engine.last.worst[0]:.4f} there, {engine.last.worst[1]:.4f} here" in str(caught.value)


async def test_an_update_too_small_for_the_bound_that_did_nothing_is_found_as_well(
    verified, tmp_path
):
    engine, pretender = verified

    def a_little(model):
        model.model.layers[1].mlp.down_proj.weight.data.mul_(1.0005)

    new = published(tmp_path, "new", a_little)
    pretender.instead = published(tmp_path, "old")
    with pytest.raises(WeightMismatchError, match="nearer to those before"):
        await engine.update_weights(new, policy_version=1)
    assert engine.last.mean_gap < BOUND


async def test_an_update_that_changes_nothing_is_no_mismatch(verified, tmp_path):
    engine, _ = verified
    await engine.update_weights(published(tmp_path, "same"), policy_version=1)
    assert engine.last.mean_gap < 1e-5


async def test_log_probabilities_that_are_not_of_the_sampled_distribution_are_found(verified):
    engine, pretender = verified
    stream = pretender.inner.stream

    def at_temperature_1(prompt_ids, sampling, *, session_id):
        # As SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1: the right tokens, the raw log-probabilities.
        raw = type(sampling)(
            max_new_tokens=sampling.max_new_tokens, seed=sampling.seed, temperature=1.0
        )
        return stream(prompt_ids, raw, session_id=session_id)

    pretender.stream = at_temperature_1
    with pytest.raises(WeightMismatchError):
        await engine.check(0)
